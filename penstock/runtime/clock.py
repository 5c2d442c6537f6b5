"""When something was done on each device of a rank, in seconds of one clock."""

import time
from collections.abc import Iterable

import torch

from .devices import Event, StageDevice


class Clock:
    """Marks points in time on GPUs' streams and on the CPU, and reads them all at the end.

    A GPU's events tell only the time between two of them, so each GPU gets an event whose time on
    the CPU's clock is known: the GPU is idle then.
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
        """Mark the time at which `device` has done all it was given so far."""
        event = device.timing_mark()
        self._marks.append(time.perf_counter() if event is None else (device.device, event))

    def times_s(self) -> list[float]:
        """Read the times of all marks, in turn; waits for the GPUs."""
        return [mark if isinstance(mark, float) else self._read_s(*mark) for mark in self._marks]

    def _read_s(self, device: torch.device, event: Event) -> float:
        base, base_s = self._bases[device]
        event.synchronize()
        elapsed_ms: float = base.elapsed_time(event)
        return base_s + elapsed_ms / 1e3
