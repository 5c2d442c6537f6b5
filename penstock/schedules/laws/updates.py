"""The laws of weight updates within a schedule."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedules import ir

from .lanes import Lanes

Version = Callable[[int, int, int, int], int]
"""(stage, micro-batch, micro-batches between two updates, number of stages) -> the version of the
weights for the micro-batch's forward there."""


def one_version(lanes: Lanes) -> None:
    """Check that no weights change, and that no forward asks for changed ones."""
    for stage in range(lanes.num_stages):
        for position in lanes.positions(stage, ir.UpdateWeights):
            problem = "weights change here, and the family is synchronous: the caller's optimizer "
            raise lanes.fault(stage, position, f"{problem}moves them when all is done")
        for position, x in lanes.each(stage, ir.Forward):
            if x.version:
                raise lanes.fault(stage, position, "nothing updates the weights of its stage")


def updates(lanes: Lanes) -> None:
    """Check that each update comes between the last backward of its mini-batch and the first of
    the next, and that a forward asks for no version before it is made.
    """
    size = microbatches_per_update(lanes)  # of a mini-batch
    for stage in range(lanes.num_stages):
        ended = lanes.positions(stage, *ir.ADDS_GRADIENTS)
        made_at = lanes.positions(stage, ir.UpdateWeights)
        for number, position in enumerate(made_at, 1):
            if not ended[number * size - 1] < position < [*ended, position + 1][number * size]:
                raise lanes.fault(
                    stage,
                    position,
                    f"update {number} comes after {size * number} micro-batches' gradients, and "
                    "before those of the next",
                )
        num_made = 0
        for position, x in lanes.each(stage, ir.Forward):
            while num_made < len(made_at) and made_at[num_made] < position:
                num_made += 1
            if x.version > num_made:
                problem = f"its stage's weights were updated {num_made} times so far"
                raise lanes.fault(stage, position, f"{problem}, not {x.version}")


def commits_by_minibatch(lanes: Lanes) -> None:
    """Check that statistics are committed, if at all, between the Forwards of two mini-batches."""
    per_update = microbatches_per_update(lanes)
    for stage in range(lanes.num_stages):
        positions = lanes.positions(stage, ir.CommitStatistics)
        if not positions:
            continue
        forwards = lanes.positions(stage, ir.Forward)
        ends = forwards[per_update - 1 :: per_update]
        starts = [*forwards[per_update::per_update], positions[-1] + 1]
        for n, position in enumerate(positions):
            if n >= len(ends) or not ends[n] < position < starts[n]:
                problem = f"statistics are committed once for every {per_update} micro-batches"
                raise lanes.fault(stage, position, f"{problem}, after their last forward")
        if len(positions) < len(ends):
            raise lanes.fault(stage, ends[len(positions)], "its statistics are not committed")


def microbatches_per_update(lanes: Lanes) -> int:
    """Return how many micro-batches make one update; a ScheduleError if updates differ."""
    counts = {s: len(lanes.positions(s, ir.UpdateWeights)) for s in range(lanes.num_stages)}
    number = counts[0]
    if len(set(counts.values())) > 1 or not number or lanes.num_microbatches % number:
        raise ScheduleError(
            f"the weights of the stages are updated {list(counts.values())} times in "
            f"{lanes.num_microbatches} micro-batches; each stage needs as many updates, each of "
            f"as many micro-batches.\n{lanes.schedule}"
        )
    return lanes.num_microbatches // number


@dataclass(frozen=True, slots=True)
class Sees:
    """Check that each forward sees the family's `version` of the weights."""

    version: Version

    def __call__(self, lanes: Lanes) -> None:
        per_update = microbatches_per_update(lanes)
        for stage in range(lanes.num_stages):
            for position, x in lanes.each(stage, ir.Forward):
                stated = self.version(stage, x.microbatch, per_update, lanes.num_stages)
                if x.version != stated:
                    problem = f"it sees version {x.version} of the weights, and the family says"
                    raise lanes.fault(stage, position, f"{problem} {stated}")
