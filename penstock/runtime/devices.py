"""Run a stage's kernels and copies on two streams of its GPU; do nothing on a CPU.

    compute   F0 ─────── F1 ─────── F2 ───────
    copy            x1 ──►┘    x2 ──►┘          copies overlap with the kernels before

Stages on the same GPU share its memory, but each has its own two streams.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.model.pytree import flatten

_T = TypeVar("_T", Tensor, Tensor | None)

Event = torch.cuda.Event
"""A CUDA event: reached once the stream has finished the work issued before it."""


def why_missing(name: Any) -> str:
    """Return why no stage of this process can run on a device; "" if one can."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        return f"{name!r} is no device that this torch knows"
    if device.type == "cuda":
        is_here = (device.index or 0) < torch.cuda.device_count()
    elif device.type in ("cpu", "meta"):
        is_here = device.type == "cpu" and not device.index
    else:
        try:
            is_here = torch.empty(0, device=device).device.type == device.type
        except (RuntimeError, AssertionError, ImportError):
            is_here = False
    why = "has no values" if device.type == "meta" else "this process does not have"
    return "" if is_here else f"{name!r} is a device that {why}"


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU that this process may still take or has taken; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def with_index(device: torch.device) -> torch.device:
    """Return the device with its number: `cuda` means the current GPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def order_copies(*values: Any, after: bool) -> None:
    """Order a worker's copies of the caller's values with the caller's current streams.

    Workers copy them to other devices on the default stream of the tensors' GPU.  It waits for the
    caller's current stream before a run, and that one for it `after` the run.
    """
    tensors, _ = flatten(values)
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        default, current = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
        source, target = (default, current) if after else (current, default)
        target.wait_stream(source)


class StageDevice:
    """A device, with one stage's compute stream and copy stream if it is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._compute = torch.cuda.Stream(device) if self.is_cuda else None
        self._copy = torch.cuda.Stream(device) if self.is_cuda else None

    def __reduce__(self) -> tuple[Any, ...]:
        return StageDevice, (self.device,)  # a copy has streams of its own

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Issue kernels to this stage's compute stream inside."""
        if self._compute is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._compute):
            yield

    def wait_for_caller(self) -> None:
        """Let both streams wait for the work issued so far to the caller's current stream."""
        if self._compute is not None and self._copy is not None:
            current = torch.cuda.current_stream(self.device)
            self._compute.wait_stream(current)
            self._copy.wait_stream(current)

    def make_caller_wait(self) -> None:
        """Let the caller's current stream wait for all work of this stage."""
        if self._compute is not None and self._copy is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._compute)
            current.wait_stream(self._copy)

    def mark(self) -> Event | None:
        """Record an event on the compute stream; return None on a CPU."""
        return None if self._compute is None else self._compute.record_event()

    @contextmanager
    def copying(self) -> Iterator[torch.cuda.Stream]:
        """Issue copies to the copy stream inside, after the kernels issued so far."""
        assert self._compute is not None
        assert self._copy is not None
        self._copy.wait_stream(self._compute)
        with torch.cuda.stream(self._copy):
            yield self._copy

    def mark_copies(self) -> Event | None:
        """Record an event on the copy stream; return None on a CPU."""
        return None if self._copy is None else self._copy.record_event()

    def wait(self, event: Event) -> None:
        """Let the compute stream wait for an event."""
        if self._compute is not None:
            self._compute.wait_event(event)

    def synchronize(self) -> None:
        """Wait until the compute stream is idle."""
        if self._compute is not None:
            self._compute.synchronize()

    def timing_mark(self) -> Event | None:
        """Record an event with its time on the compute stream; return None on a CPU."""
        event = Event(enable_timing=True)
        return None if self._compute is None else self._compute.record_event(event)

    def bring(self, tensors: Sequence[_T], event: Event | None) -> list[_T]:
        """Return tensors on this device; those of other devices are copied on the copy stream."""
        if self._compute is None or self._copy is None:
            if event is not None:
                event.synchronize()
            return [self._here(tensor) for tensor in tensors]
        with torch.cuda.stream(self._copy):
            if event is not None:
                self._copy.wait_event(event)
            here = [self._here(tensor) for tensor in tensors]
        self._compute.wait_stream(self._copy)
        # The allocator must not reuse a tensor's memory while another stream still reads it.
        for tensor in here:
            if tensor is not None:
                tensor.record_stream(self._compute)
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda and tensor.device != self.device:
                tensor.record_stream(self._copy)
        return here

    def _here(self, tensor: _T) -> _T:
        if tensor is None or tensor.device == self.device:
            return tensor
        # A copy to the host waits for its values: the CPU reads them at once.
        return tensor.to(self.device, non_blocking=tensor.is_cuda and self.is_cuda)


class Clock:
    """Records times on GPU streams and on the CPU, and reads them all at the end.

    Events tell only the time between two of them.  So each GPU records a first event while it is
    idle, whose time on the CPU's clock is known.
    """

    def __init__(self, devices: Iterable[StageDevice]) -> None:
        self._bases: dict[torch.device, tuple[Event, float]] = {}
        self._marks: list[tuple[torch.device, Event] | float] = []
        for device in devices:
            if device.is_cuda and device.device not in self._bases:
                device.synchronize()
                base = device.timing_mark()
                assert base is not None
                self._bases[device.device] = (base, time.perf_counter())

    def mark(self, device: StageDevice) -> None:
        """Record the time at which `device` finishes the work issued so far."""
        event = device.timing_mark()
        self._marks.append(time.perf_counter() if event is None else (device.device, event))

    def times_s(self) -> list[float]:
        """Return the times of all marks in order, in seconds; wait for the GPUs."""
        times_s: list[float] = []
        for mark in self._marks:
            if isinstance(mark, float):
                times_s.append(mark)
            else:
                device, event = mark
                base, base_s = self._bases[device]
                event.synchronize()
                times_s.append(base_s + base.elapsed_time(event) / 1e3)
        return times_s
