"""CUDA graphs of pretended GPUs: what is captured does not count as run, and runs at each replay.

While a graph is captured, operators run to know their shapes, and are recorded.  At the end memory
from before has its old values again, and memory of the capture has none: all bits are 1.  A replay
runs the recorded operators on the very memory of the capture; numbers of Python and tensors of the
CPU are those of the capture, and random operators draw anew.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from .streams import Stream, Streams
from .tensors import Tensors

_FAILED = "CUDA error: operation failed due to a previous error during capture"


class Capture:
    """A capture under way, and the record of its operators."""

    def __init__(self, tensors: Tensors, origin: Stream, registered: list[Generator]) -> None:
        self._tensors, self._origin, self._has_failed = tensors, origin, False
        with tensors.streams.lock:
            self._begin = origin.issue()
        self.replays: list[Callable[[], Any]] = []
        self.reads: dict[int, Tensor] = {}
        self.written: dict[int, Tensor] = {}
        self._new: dict[int, Tensor] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._registered = [torch.default_generator, *registered]
        self._states = [generator.get_state() for generator in self._registered]

    # -- what CUDA refuses -----------------------------------------------------------------------

    def refuse(self, what: str) -> None:
        """Raise as CUDA does, and fail the capture."""
        self._has_failed = True
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def holds(self, clock: dict[int, int]) -> bool:
        """Tell whether a stream or an event belongs to the capture."""
        return clock.get(self._origin.number, 0) >= self._begin

    def check_waits(self, waiting: dict[int, int], awaited: dict[int, int]) -> None:
        """Refuse that captured work waits for work from before the capture."""
        if awaited and self.holds(waiting) and not self.holds(awaited):
            self.refuse("a wait for a stream or an event outside the capture")

    # -- the record ------------------------------------------------------------------------------

    def prepare(self, func: Any, args: Any, kwargs: Any, stream: Stream) -> None:
        """Keep the values that an operator is about to overwrite."""
        if not self.holds(stream.clock):
            self.refuse(f"{func} on {stream.name}, which was not forked from the capture")
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors_of(value):
                if self._tensors.memory.block_of(tensor) is None:
                    continue
                (self.written if writes else self.reads)[_key(tensor)] = _alias(tensor)
                if writes and _key(tensor) not in self._new:
                    whole = _whole(tensor)
                    self._before.setdefault(_key(tensor), (whole, whole.clone()))
        if kwargs.get("generator") is not None:
            self.check_registered(kwargs["generator"])

    def check_registered(self, generator: Generator) -> None:
        """Refuse a generator that the graph does not know."""
        if _address(generator) not in map(_address, self._registered):
            self.refuse("a draw from a generator that was not registered")

    def record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operator that has run."""
        # A tensor of the CPU is a number, which CUDA takes at the capture.
        args, kwargs = tree_map_only(Tensor, self._kept, (args, kwargs))
        outputs = [_alias(tensor) for tensor in _tensors_of(result)]
        given = {_key(tensor) for tensor in _tensors_of((args, kwargs))}
        fresh = [_key(output) not in given for output in outputs]
        self._add(output for output, is_fresh in zip(outputs, fresh, strict=True) if is_fresh)

        def replay() -> None:
            again = _tensors_of(func(*args, **kwargs))
            for output, new, is_fresh in zip(outputs, again, fresh, strict=True):
                if is_fresh:
                    output.copy_(new)

        self.replays.append(replay)

    def record_made(self, make: Callable[[], Tensor], made: Tensor) -> None:
        """Record a new tensor that a function of torch has made on the GPU."""
        output = _alias(made)
        self._add([output])
        self.replays.append(lambda: output.copy_(make()))

    def use(self, stream: Stream, reads: Any, writes: Any) -> None:
        """Note what an operation of a stream that has joined the capture uses."""
        if not self.holds(stream.clock):
            self.refuse(f"an operation on {stream.name}, which was not forked from the capture")
        count, memory = stream.issue(), self._tensors.memory
        uses = ((reads, self.reads, memory.read), (writes, self.written, memory.write))
        for tensors, noted, note in uses:
            for tensor in tensors:
                block = memory.block_of(tensor)
                assert block is not None, "a tensor of the CPU in an operation of the GPU"
                note(block, stream, count, "an operation between processes")
                noted[_key(tensor)] = _alias(tensor)

    def _add(self, outputs: Any) -> None:
        for output in outputs:
            self._new[_key(output)] = self.written[_key(output)] = output

    def _kept(self, tensor: Tensor) -> Tensor:
        on_gpu = self._tensors.memory.block_of(tensor) is not None
        return _alias(tensor) if on_gpu else tensor.clone()

    def end(self) -> None:
        """Undo what ran.

        Raises:
            RuntimeError: an operator failed, or a stream did not join the first one again.
        """
        for whole, values in self._before.values():
            whole.copy_(values)
        for tensor in self._new.values():
            _whole(tensor).fill_(255)
        for generator, state in zip(self._registered, self._states, strict=True):
            generator.set_state(state)
        # Nothing of it has run: no later work races with it.
        streams = self._tensors.streams
        ends = dict(self._origin.clock)
        streams.host.learn({n: c for s in streams.every for n, c in s.clock.items()})
        if self._has_failed:
            raise RuntimeError(_FAILED)
        for stream in streams.every:
            unjoined = ends.get(stream.number, 0) < stream.clock.get(stream.number, 0)
            if unjoined and self.holds(stream.clock):
                raise RuntimeError(f"CUDA error: unjoined work in a capture, on {stream.name}")


@contextmanager
def recorded_loan(streams: Streams, default: Generator, generator: Generator) -> Iterator[None]:
    """Let the replays of what is captured inside draw from `generator` instead of `default`."""
    capture, states = streams.capture, list[Tensor]()

    def borrow() -> None:
        states.append(default.get_state())
        default.set_state(generator.get_state())

    def give_back() -> None:
        generator.set_state(default.get_state())
        default.set_state(states.pop())

    if capture is None:
        yield
        return
    capture.check_registered(generator)
    capture.replays.append(borrow)
    yield
    capture.replays.append(give_back)


class CUDAGraph:
    """A graph; `tensors` are set by the class that `graph_classes` makes."""

    tensors: Tensors

    def __init__(self) -> None:
        self._captured: Capture | None = None
        self._registered: list[Generator] = []

    def register_generator_state(self, generator: Generator) -> None:
        self._registered.append(generator)

    def capture_begin(self) -> None:
        streams = self.tensors.streams
        assert self._captured is None, "a graph is captured once"
        assert streams.capture is None
        assert streams.current() is not streams.default(), "the default stream cannot capture"
        self._captured = Capture(self.tensors, streams.current(), self._registered)
        streams.capture = self._captured

    def capture_end(self) -> None:
        assert self._captured is not None
        self.tensors.streams.capture = None
        with _disable_current_modes(), torch.no_grad():
            self._captured.end()

    def replay(self) -> None:
        captured, memory = self._captured, self.tensors.memory
        assert captured is not None
        stream = self.tensors.streams.current()
        with self.tensors.streams.lock:
            count = stream.issue()
            used: list[tuple[Tensor, Any]] = [(t, memory.read) for t in captured.reads.values()]
            used += [(t, memory.write) for t in captured.written.values()]
            for tensor, use in used:
                if (block := memory.block_of(tensor)) is not None:
                    use(block, stream, count, "a replay")
        with _disable_current_modes(), torch.no_grad():
            for replay in captured.replays:
                replay()


def graph_classes(tensors: Tensors) -> dict[str, Any]:
    """Return what replaces the classes and functions of graphs in `torch.cuda`."""
    streams = tensors.streams

    @contextmanager
    def graph(
        cuda_graph: CUDAGraph, stream: Stream, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        streams.synchronize()
        with streams.on_stream(stream):
            cuda_graph.capture_begin()
            try:
                yield
            finally:
                cuda_graph.capture_end()

    return {
        "CUDAGraph": type("CUDAGraph", (CUDAGraph,), {"tensors": tensors}),
        "graph": graph,
        "is_current_stream_capturing": lambda: streams.capture is not None,
    }


def _tensors_of(value: Any) -> list[Tensor]:
    return [part for part in tree_leaves(value) if isinstance(part, Tensor)]


def _address(generator: Any) -> int:
    """Return the address of a generator, which has several objects of Python."""
    address: int = generator._cdata
    return address


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _alias(tensor: Tensor) -> Tensor:
    """Return the same memory, whatever becomes of the tensor."""
    with _disable_current_modes(), torch.no_grad():
        return tensor.detach()


def _whole(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
