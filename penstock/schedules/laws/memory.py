"""Law: no stage keeps more micro-batches than it may."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.schedules import ir

from .lanes import Lanes


@dataclass(frozen=True, slots=True)
class AtMostLive:
    """Check that at most `limit` micro-batches are between Forward and the end of their Backward,
    or BackwardWeight, on any stage.
    """

    limit: int

    def __call__(self, lanes: Lanes) -> None:
        for stage in range(lanes.num_stages):
            for position, live in _live(lanes, stage):
                if live > self.limit:
                    problem = f"its stage keeps {live} micro-batches alive, more than {self.limit}"
                    raise lanes.fault(stage, position, problem)


def peak_live(lanes: Lanes, stage: int) -> int:
    """Return the most micro-batches that are between Forward and the end of their Backward, or
    BackwardWeight, on `stage`.
    """
    return max((live for _, live in _live(lanes, stage)), default=0)


def _live(lanes: Lanes, stage: int) -> Iterator[tuple[int, int]]:
    """Yield (position, number of live micro-batches) after each Forward."""
    backwards, done = lanes.positions(stage, *ir.ADDS_GRADIENTS), 0
    for number, position in enumerate(lanes.positions(stage, ir.Forward), 1):
        while done < len(backwards) and backwards[done] < position:
            done += 1
        yield position, number - done
