"""What copies from one GPU of this host to another take, alone and all neighbours at once."""

from itertools import pairwise

import torch

from .figures import Spread, seconds_of
from .link import MeasuredLink

_SMALL_BYTES = 64


def measure_gpus(devices: list[torch.device], num_bytes: int, budget_s: float) -> MeasuredLink:
    """Measure the first two devices, and all neighbours both ways at once."""
    pairs = [pair for a, b in pairwise(devices) for pair in ((a, b), (b, a))]
    part_s = budget_s / 4
    small_s = _copies_s(pairs[:1], _SMALL_BYTES, part_s)
    large_s = _copies_s(pairs[:1], num_bytes, part_s)
    crossing_s = _copies_s(pairs, num_bytes, part_s)
    begun_s = _copies_s(pairs[:1], _SMALL_BYTES, part_s, until_done=False)
    return MeasuredLink(num_bytes, small_s, large_s, crossing_s, begun_s, begun_s)


def _copies_s(
    pairs: list[tuple[torch.device, torch.device]],
    num_bytes: int,
    budget_s: float,
    *,
    until_done: bool = True,
) -> Spread:
    """Time copies that are begun together."""
    copies = [
        (torch.ones(num_bytes // 4, device=a), torch.empty(num_bytes // 4, device=b))
        for a, b in pairs
    ]
    streams = [torch.cuda.Stream(a) for a, _ in pairs]
    ends = {device for pair in pairs for device in pair}
    for device in ends:
        torch.cuda.synchronize(device)

    def run() -> None:
        for (source, target), stream in zip(copies, streams, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    def wait() -> None:
        for device in ends:
            torch.cuda.synchronize(device)

    found = seconds_of(run, budget_s, wait if until_done else lambda: None)
    wait()
    return found
