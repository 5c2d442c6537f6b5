"""What handing a tensor over from one thread to another takes, by the queues of training."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from penstock.schedules.ir import Forward, Message
from penstock.schedules.transfers import chain_transfers
from penstock.transport.threads import QueueChannels

from .figures import LEAST_TIMES, MeasuredLink, Spread, seconds_of

_TIMEOUT_S = 60.0
_INSTRUCTION = Forward(0, 0)
_AT_ONCE = 100


def measure_threads(num_bytes: int, budget_s: float) -> MeasuredLink:
    """Measure two threads that pass a tensor to each other, and read and write all of it.

    What reading and writing takes one thread alone is not counted.  Nothing is copied, so that
    messages of both ways do not meet.
    """
    tensor = torch.zeros(num_bytes // 4)
    part_s = budget_s / 4
    small_s = _one_way_s(lambda: None, part_s)
    passed_s = _one_way_s(lambda: tensor.add_(1), part_s)
    alone_s = seconds_of(lambda: tensor.add_(1), part_s).middle
    large_s = Spread(*(max(0.0, seconds - alone_s) for seconds in passed_s))
    overhead_s = _overhead_s(part_s)
    return MeasuredLink(num_bytes, small_s, large_s, large_s, overhead_s, overhead_s)


def _one_way_s(touch: Callable[[], Any], budget_s: float) -> Spread:
    """Return half of what it takes to another thread and back, with a touch in each."""
    channels = QueueChannels(chain_transfers(2), _TIMEOUT_S, nullcontext())
    end = object()

    def answer() -> None:
        torch.set_num_threads(1)
        count = 0
        while channels.receive(_there(count), _INSTRUCTION) is not end:
            touch()
            channels.send(_back(count), None)
            count += 1

    peer = threading.Thread(target=answer, daemon=True)
    peer.start()
    times_s: list[float] = []
    began_s = time.perf_counter()
    while len(times_s) < LEAST_TIMES or time.perf_counter() - began_s < budget_s:
        start_s = time.perf_counter()
        channels.send(_there(len(times_s)), None)
        channels.receive(_back(len(times_s)), _INSTRUCTION)
        touch()
        times_s.append((time.perf_counter() - start_s) / 2)
    channels.send(_there(len(times_s)), end)
    peer.join(_TIMEOUT_S)
    return Spread.of(times_s)


def _overhead_s(budget_s: float) -> Spread:
    """Return half of what a send and the receive of a message that is there take one thread."""
    channels = QueueChannels(chain_transfers(2), _TIMEOUT_S, nullcontext())

    def run() -> None:
        for _ in range(_AT_ONCE):
            channels.send(_there(0), None)
        for _ in range(_AT_ONCE):
            channels.receive(_there(0), _INSTRUCTION)

    return seconds_of(run, budget_s).times(1 / (2 * _AT_ONCE))


def _there(microbatch: int) -> Message:
    return False, 0, 1, microbatch


def _back(microbatch: int) -> Message:
    return True, 1, 0, microbatch
