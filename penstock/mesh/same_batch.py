"""Compare the shapes of what shards of a stage are given, before any of them sends a tensor."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import BatchError
from penstock.model.pytree import flatten

if TYPE_CHECKING:
    from .control import Control

_Ranks = Sequence[Sequence[Sequence[int]]]


def shapes_text(inputs: Any, targets: Any) -> str:
    """Say the shapes and types of a batch; None is not read."""
    return " and ".join(
        f"{what} of {', '.join(f'{tuple(x.shape)} {x.dtype}' for x in flatten(value)[0])}"
        for what, value in (("inputs", inputs), ("targets", targets))
        if value is not None
    )


def check_same_shapes(world: "Control", ranks: _Ranks, found: Sequence[float], mine: str) -> None:
    """See that the shards of each stage read alike; `ranks` are by replica, stage and shard, and
    `found` is a number of each rank's text.

    Raises:
        BatchError: some do not; on every process alike.
    """
    every = (shards for stages in ranks for shards in stages)
    unlike = [shards for shards in every if len({found[rank] for rank in shards}) > 1]
    if not unlike:
        return
    said = world.gather(mine, "for the shapes that the others were given")
    first = unlike[0][0]
    other = next(rank for rank in unlike[0] if said[rank] != said[first])
    raise BatchError(
        f"rank {first} was given {said[first]}, rank {other} {said[other]}; all shards of a "
        "stage must be given the same mini-batch"
    )
