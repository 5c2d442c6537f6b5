"""Read the time on the device that works: of an accelerator, when it gets there."""

import time

import torch

Mark = float | torch.cuda.Event
"""A point in time, on the host or on an accelerator."""


def mark(device: torch.device) -> Mark:
    """Note when the device has done all that it was asked for so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds between two marks of a device; wait for the second one."""
    if isinstance(start, float):
        assert isinstance(end, float)
        return end - start
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1_000
