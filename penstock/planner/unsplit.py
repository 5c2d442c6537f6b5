"""Backwards that run in one part although the schedule divides them."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.errors import PlanError
from penstock.schedules.ir import BackwardInput, Schedule


@dataclass(frozen=True, slots=True)
class Unsplit:
    """A layer, by number, whose backward cannot run in two parts, and the reason.

    The number after the last layer is the loss.  `whole`: no backward of its stage can.
    """

    layer: int
    reason: str
    whole: bool = False


def divides_backwards(schedule: Schedule) -> bool:
    """Tell whether a schedule has backwards in two parts."""
    return any(isinstance(x, BackwardInput) for _, x in schedule)


def check_unsplit(unsplit: Sequence[Unsplit], num_layers: int) -> None:
    """Raise PlanError if a layer is named that is not there."""
    for entry in unsplit:
        if not 0 <= entry.layer <= num_layers:
            raise PlanError(f"unsplit names layer {entry.layer}, and there are {num_layers}")


def unsplit_lines(
    unsplit: Sequence[Unsplit] | None, layers: Sequence[object], partition: Sequence[int]
) -> Iterator[str]:
    """Yield a line for each backward in one part; `unsplit` is None before the first step."""
    if not unsplit:
        which = "the first step shows which" if unsplit is None else "all layers"
        yield f"backwards in two parts: {which}"
    ends = list(accumulate(partition))
    for entry in unsplit or ():
        name = f"layer {layers[entry.layer]}" if entry.layer < len(layers) else "the loss"
        stage = min(bisect_right(ends, entry.layer), len(partition) - 1)
        where = f"all of stage {stage}, because of {name}" if entry.whole else name
        yield f"backward in one part: {where}, {entry.reason}"
