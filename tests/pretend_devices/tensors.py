"""Tensors of the CPU that say they are on a GPU: their operators, and copies between devices."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from .memory import Block, Memory
from .streams import Streams, Timeline

CPU = torch.device("cpu")

_SHAPE_ONLY = ("empty_like", "new_empty", "new_empty_strided", "new_zeros", "new_full", "set_")
"""Operators that read no values of their arguments."""
_NO_WORK = frozenset(("empty_like", "new_empty", "new_empty_strided", "set_", "detach_"))
"""Operators that do no work on the GPU; others use their memory."""
_HOST_WAITS = frozenset(
    ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2")
)
"""Operators whose result, or its shape, the host needs: it waits for their stream."""


class Tensors:
    """Knows where tensors are; notes what operators and copies do to their memory."""

    def __init__(self, streams: Streams, memory: Memory) -> None:
        self.streams, self.memory = streams, memory

    def device_of(self, tensor: Tensor) -> torch.device | None:
        """Return the device that a tensor says; None if it is an ordinary tensor."""
        block = self.memory.block_of(tensor)
        return None if block is None else block.device

    def place(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Let a new tensor be on a device, or in pinned memory of the host."""
        with self.streams.lock:
            home = self._timeline(device)
            home.issue()
            self.memory.allocate(tensor, device, home)
        return tensor

    def make(self, make: Any, device: torch.device, *, of_values: bool) -> Tensor:
        """Return a new tensor on a device, of Python's values or of the device's own making."""
        made = self.place(make(), device)
        if self.streams.capture is not None:
            if of_values:
                self.streams.capture.refuse("a copy of Python's values to the GPU")
            self.streams.capture.record_made(make, made)
        return made

    def _timeline(self, device: torch.device) -> Timeline:
        is_gpu = device.type == "cuda"
        return self.streams.current(device) if is_gpu else self.streams.host

    # -- operators ------------------------------------------------------------------------------

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on the current stream of its tensors' device.

        Raises:
            RuntimeError: its tensors are on several devices.
        """
        name = func._schema.name.partition("::")[2]
        given = _tensors_of((args, kwargs))
        with self.streams.lock:
            blocks = {id(t): b for t in given if (b := self.memory.block_of(t)) is not None}
        if not blocks:
            return func(*args, **kwargs)
        capture = self.streams.capture
        if capture is not None and name in _HOST_WAITS:
            capture.refuse(f"{name} waits for the GPU")
        if name == "copy_" and self._crosses(args[0], args[1]):
            non_blocking = bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False)
            self._refuse_copy()
            self._settle_copy(args[0], args[1])
            func(*args, **kwargs)
            self.transfer(args[0], args[1], non_blocking)
            return args[0]
        device = _one_device(name, given, blocks)
        self.streams.settle(self._timeline(device).clock)
        records = capture is not None and device.type == "cuda" and not _is_view(func)
        if records:
            capture.prepare(func, args, kwargs, self._timeline(device))
        result = func(*args, **kwargs)
        if records and name not in _NO_WORK:
            capture.record(func, args, kwargs, result)
        with self.streams.lock:
            self._note(func, name, device, args, kwargs, result)
        return result

    def _crosses(self, target: Tensor, source: Tensor) -> bool:
        there, here = self.device_of(target) or CPU, self.device_of(source) or CPU
        return there != here

    def _note(
        self, func: Any, name: str, device: torch.device, args: Any, kwargs: Any, result: Any
    ) -> None:
        """Note the reads and writes of an operator, and place its result."""
        if _is_view(func):
            return
        timeline = self._timeline(device)
        count = timeline.issue()
        for argument, value in _arguments(func, args, kwargs) if name not in _SHAPE_ONLY else ():
            writes = argument.alias_info is not None and argument.alias_info.is_write
            use = self.memory.write if writes else self.memory.read
            for block in filter(None, map(self.memory.block_of, _tensors_of(value))):
                use(block, timeline, count, name)
        for tensor in _tensors_of(result) if device.type == "cuda" else ():
            if self.memory.block_of(tensor) is None and not tensor.is_meta:
                self.memory.allocate(tensor, device, timeline)
        if name in _HOST_WAITS:
            self.streams.host.learn(timeline.clock)

    # -- copies between devices -----------------------------------------------------------------

    def moved(
        self, tensor: Tensor, device: torch.device, dtype: torch.dtype, *, non_blocking: bool
    ) -> Tensor:
        """Return a copy of a tensor on another device."""
        self._refuse_copy()
        self._settle_copy(tensor)
        with _disable_current_modes(), torch.no_grad():
            copy = tensor.detach().clone()
            copy = copy if dtype == copy.dtype else _cast(copy, dtype)
        # A copy to the host that does not wait goes to pinned memory, which the GPU fills later.
        if device.type == "cuda" or non_blocking:
            self.place(copy, device)
        self.transfer(copy, tensor, non_blocking)
        return copy

    def _refuse_copy(self) -> None:
        if self.streams.capture is not None:
            self.streams.capture.refuse("a copy between devices")

    def _settle_copy(self, *tensors: Tensor) -> None:
        """Wait until what the streams of a copy wait for has truly ended."""
        for tensor in tensors:
            self.streams.settle(self._timeline(self.device_of(tensor) or CPU).clock)

    def transfer(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        """Note a copy between devices, with the waits that torch's own copies make.

        The source's current stream copies between GPUs.  It waits for the target's current stream
        first, and that one waits for the copy.  The host waits for its copies, unless
        `non_blocking`.
        """
        there, here = self.device_of(source) or CPU, self.device_of(target) or CPU
        with self.streams.lock:
            copying = self._timeline(here if there.type == "cpu" else there)
            receiving = self._timeline(here)
            if there.type == here.type:
                receiving.issue()
                copying.learn(receiving.clock)
            count = copying.issue()
            for tensor, use in ((source, self.memory.read), (target, self.memory.write)):
                if (block := self.memory.block_of(tensor)) is not None:
                    use(block, copying, count, "a copy")
            if there.type == here.type:
                receiving.learn(copying.clock)
            elif not non_blocking:
                self.streams.host.learn(copying.clock)

    def read_by_host(self, tensor: Tensor) -> None:
        """Note that the host reads a tensor itself; it waits first for a GPU's current stream."""
        self._settle_copy(tensor)
        with self.streams.lock:
            block = self.memory.block_of(tensor)
            if block is None:
                return
            self._refuse_copy()
            timeline = self._timeline(block.device)
            self.memory.read(block, timeline, timeline.issue(), "the host")
            self.streams.host.learn(timeline.clock)


class Operators(TorchDispatchMode):
    """Lets a thread's operators run as `Tensors` says."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = tensors

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else every operator would look like a call of compiled code

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tensors.run(func, args, kwargs or {})


def move_function(tensors: Tensors) -> Any:
    """Return the differentiable function that moves a tensor to another device."""

    class Move(torch.autograd.Function):
        """Copies a tensor to a device, and its gradient back."""

        @staticmethod
        def forward(ctx: Any, tensor: Tensor, device: Any, dtype: Any, non_blocking: bool) -> Any:
            ctx.back = tensor.device, tensor.dtype
            return tensors.moved(tensor, device, dtype, non_blocking=non_blocking)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            device, dtype = ctx.back
            moved = tensors.moved(gradients[0], device, dtype, non_blocking=False)
            return moved, None, None, None

    return Move.apply


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype).copy_(tensor)


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for place, argument in enumerate(func._schema.arguments):
        yield argument, args[place] if place < len(args) else kwargs.get(argument.name)


def _tensors_of(value: Any) -> list[Tensor]:
    return [part for part in tree_leaves(value) if isinstance(part, Tensor)]


def _is_view(func: Any) -> bool:
    """Tell whether an operator touches no values: its results are views."""
    aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    return any(not alias.is_write for alias in aliases)


def _one_device(name: str, given: list[Tensor], blocks: dict[int, Block]) -> torch.device:
    """Return the device of an operator; a number on the CPU may meet tensors of a GPU."""
    devices = {blocks[id(t)].device if id(t) in blocks else CPU for t in given}
    numbers = all(t.dim() == 0 for t in given if id(t) not in blocks)
    gpus = [device for device in devices if device.type == "cuda"]
    if len(gpus) > 1 or (gpus and not numbers and "index" not in name):
        raise RuntimeError(f"{name} got tensors on several devices: {sorted(map(str, devices))}")
    return gpus[0] if gpus else CPU
