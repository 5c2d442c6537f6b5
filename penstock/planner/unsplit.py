"""What a plan says of backwards that run in one part where its schedule divides them."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.errors import PlanError
from penstock.schedules.ir import BackwardInput, Schedule


@dataclass(frozen=True, slots=True)
class Unsplit:
    """A layer whose backward is not in two parts, by its number, and what the reason is.

    The number after the last is the loss.  `whole`: because of it, that of its stage is not.
    """

    layer: int
    reason: str
    whole: bool = False


def divides_backwards(schedule: Schedule) -> bool:
    """Tell whether a schedule has backwards in two parts."""
    return any(isinstance(x, BackwardInput) for _, x in schedule)


def check_unsplit(unsplit: Sequence[Unsplit], num_layers: int) -> None:
    """Raise PlanError if a layer is named that is not there."""
    for each in unsplit:
        if not 0 <= each.layer <= num_layers:
            raise PlanError(f"unsplit names layer {each.layer}, and there are {num_layers}")


def unsplit_lines(
    unsplit: Sequence[Unsplit] | None, layers: Sequence[object], partition: Sequence[int]
) -> Iterator[str]:
    """Say in a line each what runs in one part; `unsplit` is None where that is not known yet."""
    if not unsplit:
        which = "the first step shows which" if unsplit is None else "all layers"
        yield f"backwards in two parts: {which}"
    ends = list(accumulate(partition))
    for each in unsplit or ():
        name = f"layer {layers[each.layer]}" if each.layer < len(layers) else "the loss"
        stage = min(bisect_right(ends, each.layer), len(partition) - 1)
        where = f"all of stage {stage}, because of {name}" if each.whole else name
        yield f"backward in one part: {where}, {each.reason}"
