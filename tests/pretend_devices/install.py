"""Pretend that this machine has GPUs, for a while."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, partialmethod, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Generator, Tensor, UntypedStorage

import penstock.pipeline  # noqa: F401 - a module first imported inside would keep what is replaced
from penstock.runtime import caller, devices, graphs
from penstock.runtime.random import streams as random_streams

from .graphs import graph_classes, recorded_loan
from .memory import Memory
from .streams import Event, Stream, Streams
from .tensors import CPU, Operators, Tensors, move_function

_FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "eye", "linspace"),
    *("empty_strided", "scalar_tensor", "rand", "randn", "randint", "randperm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)
"""Functions of torch that make tensors on a device."""
_OF_VALUES = (torch.tensor, torch.as_tensor)
"""Those that copy values of the host."""
_BYTES = 16 << 30
"""The memory of each pretended GPU."""


@contextmanager
def pretended_devices(num_devices: int = 2) -> Iterator[Memory]:
    """Pretend inside that there are GPUs; yield their memory, which has the races found.

    Tensors that say `cuda:N` are ordinary ones of the CPU, so they compute the same bits.  Threads
    that start inside see the GPUs too.  Afterwards torch is as it was.
    """
    streams = Streams(num_devices)
    memory = Memory(streams)
    tensors = Tensors(streams, memory)
    with ExitStack() as stack:
        for owner, replaced in _replacements(streams, tensors):
            stack.enter_context(patch.multiple(owner, **replaced))
        stack.enter_context(Operators(tensors))
        yield memory


def _replacements(streams: Streams, tensors: Tensors) -> Iterator[tuple[Any, dict[str, Any]]]:
    event = _with_first(Event, streams)
    yield torch.cuda, _of_cuda(streams, event) | graph_classes(tensors)
    yield Tensor, _of_tensors(streams, tensors)
    yield UntypedStorage, {"device": _device_of_storages(tensors.memory)}
    yield torch, {name: _factory(getattr(torch, name), streams, tensors) for name in _FACTORIES}
    # Threads that start inside run their operators in the same way.
    run = threading.Thread.run

    def run_inside(thread: threading.Thread) -> None:
        with Operators(tensors):
            run(thread)

    yield threading.Thread, {"run": run_inside}
    # Penstock holds some of torch's names itself, and runs alone under modes it does not know.
    held: Any = caller
    modes, lent = held.dispatch_modes, random_streams.lent_to_default
    yield devices, {"Event": event}
    yield (
        caller,
        {"dispatch_modes": lambda: [m for m in modes() if not isinstance(m, Operators)]},
    )

    @contextmanager
    def lent_inside(default: Generator, generator: Generator) -> Iterator[None]:
        with lent(default, generator), recorded_loan(streams, default, generator):
            yield

    made = {"new_generator": lambda device: Generator(), "lent_to_default": lent_inside}
    yield random_streams, made
    yield graphs, {"new_generator": made["new_generator"]}


def _with_first(kind: Any, first: Any) -> type:
    """Return a class whose objects are made with a first argument."""
    return type(kind.__name__, (kind,), {"__init__": partialmethod(kind.__init__, first)})


def _of_cuda(streams: Streams, event: type) -> dict[str, Any]:
    """Return what replaces functions and classes in `torch.cuda`; all devices draw as the CPU."""
    generator: Generator = torch.default_generator
    return {
        "Stream": _with_first(Stream, streams),
        "Event": event,
        "device": streams.on_device,
        "stream": streams.on_stream,
        "current_stream": streams.current,
        "default_stream": streams.default,
        "current_device": streams.index,
        "device_count": lambda: streams.num_devices,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "mem_get_info": lambda device=None: (_BYTES, _BYTES),
        "synchronize": streams.synchronize,
        "get_device_capability": lambda device=None: (8, 0),
        "memory_reserved": lambda device=None: 0,
        "default_generators": (generator,) * streams.num_devices,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
    }


def _of_tensors(  # noqa: C901 - one small function per method
    streams: Streams, tensors: Tensors
) -> dict[str, Any]:
    """Return what replaces attributes and methods of tensors."""
    device: Any = Tensor.device
    to_before: Any = Tensor.to
    move = move_function(tensors)
    numpy_before, tolist_before = Tensor.numpy, Tensor.tolist

    def device_of(tensor: Tensor) -> torch.device:
        block = tensors.memory.block_of(tensor) if _is_plain(tensor) else None
        return device.__get__(tensor) if block is None else block.device

    def to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        where, dtype, non_blocking, form = _parsed(*args, **kwargs)
        if where is not None and where.type == "cuda":
            where = torch.device("cuda", streams.index(where))
        if where is not None and "meta" not in (where.type, tensor.device.type):
            if where != tensor.device:
                moved: Tensor = move(tensor, where, dtype or tensor.dtype, non_blocking)
                return moved
        elif where is not None:
            return to_before(tensor, *args, copy=copy, **kwargs)
        form = {} if form is None else {"memory_format": form}
        return to_before(tensor, dtype or tensor.dtype, copy=copy, **form)

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        block = tensors.memory.block_of(tensor)
        assert block is not None
        assert block.device.type == "cuda"
        block.recorded.add(stream)

    def numpy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "cuda":
            raise TypeError(f"a tensor on {tensor.device} cannot become an array: use .cpu()")
        tensors.read_by_host(tensor)
        return numpy_before(tensor, *args, **kwargs)

    def tolist(tensor: Tensor) -> Any:
        tensors.read_by_host(tensor)
        return tolist_before(tensor)

    return {
        "device": property(device_of),
        "is_cuda": property(lambda tensor: tensor.device.type == "cuda"),
        "is_cpu": property(lambda tensor: tensor.device.type == "cpu"),
        "get_device": lambda tensor: -1 if tensor.device.index is None else tensor.device.index,
        "to": to,
        "cuda": lambda tensor, device=None, **how: to(tensor, f"cuda:{streams.index(device)}"),
        "cpu": lambda tensor, **how: to(tensor, "cpu"),
        "record_stream": record_stream,
        "numpy": numpy,
        "tolist": tolist,
    }


def _parsed(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool, Any]:
    """Return the device, dtype, non_blocking and memory format of the arguments of `to`."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    parsed: tuple[Any, Any, bool, Any] = torch._C._nn._parse_to(*args, **kwargs)
    return parsed


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is no object of a class that looks at the use of its attributes."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _device_of_storages(memory: Memory) -> property:
    before: Any = UntypedStorage.device

    def device_of(storage: UntypedStorage) -> torch.device:
        block = memory.block_in(storage)
        return before.__get__(storage) if block is None else block.device

    return property(device_of)


def _factory(make: Callable[..., Tensor], streams: Streams, tensors: Tensors) -> Any:
    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if pinned:
            return tensors.place(make(*args, **kwargs), CPU)
        is_gpu = not (device is None or isinstance(device, int)) and (
            torch.device(device).type == "cuda"
        )
        if not is_gpu:
            return make(*args, **kwargs)
        del kwargs["device"]
        where = torch.device("cuda", streams.index(device))
        return tensors.make(partial(make, *args, **kwargs), where, of_values=make in _OF_VALUES)

    return made
