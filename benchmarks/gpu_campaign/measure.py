"""Time a step, its launches and its kernels, and make a row of it that survives errors."""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import profile

Row = dict[str, Any]
Step = Callable[[], Any]
MIB, GIB = 1 << 20, 1 << 30
NUM_WARM_UPS = 3
"""Steps before the first that counts: a graph is captured in the third."""


def rows_of(cases: Mapping[str, Callable[[], Row]], until: float) -> Iterator[Row]:
    """Yield a row for each case: its figures, its error, or that no time was left.

    Args:
        cases: measure one row each, the most important first.
        until: time of `time.monotonic` after which no case begins.
    """
    for name, measure in cases.items():
        if time.monotonic() > until:
            yield {"name": name, "remark": "not run: no time left"}
            continue
        try:
            row = measure()
        except Exception as error:  # the other cases are worth their minutes all the same
            row = {"error": f"{type(error).__name__}: {error}"[-2000:]}
        yield {"name": name} | row


class Memory:
    """The memory that is taken after this object was made."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        gc.collect()
        if self._is_cuda:
            torch.cuda.empty_cache()
            self._before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> Row:
        """Return the most GiB of tensors, and of the allocator's segments; nothing on a CPU."""
        if not self._is_cuda:
            return {}
        allocated, reserved = self._before
        return {
            "peak_gib": (torch.cuda.max_memory_allocated() - allocated) / GIB,
            "reserved_gib": (torch.cuda.max_memory_reserved() - reserved) / GIB,
        }


def timed(model: nn.Module, step: Step, device: torch.device) -> tuple[float, float]:
    """Run a step without earlier gradients.

    Returns:
        The milliseconds until the call returned, and until its kernels had ended.
    """
    model.zero_grad()
    wait(device)
    began = time.perf_counter()
    step()
    returned = time.perf_counter()
    wait(device)
    return 1000 * (returned - began), 1000 * (time.perf_counter() - began)


def medians(model: nn.Module, step: Step, device: torch.device, num_steps: int) -> Row:
    """Return the medians of `num_steps` steps after the warm-ups, in milliseconds."""
    for _ in range(NUM_WARM_UPS):
        timed(model, step, device)
    host, whole = zip(*(timed(model, step, device) for _ in range(num_steps)), strict=True)
    return {"step_ms": median(whole), "host_ms": median(host)}


def kernels_ms(model: nn.Module, step: Step, device: torch.device) -> float | None:
    """Return the sum of the times of all kernels of a step; None where there are none."""
    with profile() as profiled:
        timed(model, step, device)
    of_device = [
        event.self_device_time_total / 1000  # from microseconds
        for event in profiled.key_averages()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    return sum(of_device) if of_device else None


def wait(device: torch.device) -> None:
    """Wait for the kernels of a card."""
    if device.type == "cuda":
        torch.cuda.synchronize()
