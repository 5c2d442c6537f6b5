"""What every process says before a call, and what follows from it for all of them alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.errors import BatchError, MeshError
from penstock.types import Reduction, Trace

Reduce = Reduction | Callable[[Any], Any]

_BY_STRENGTH = (Trace.OFF, Trace.TIME, Trace.MEMORY)


@dataclass(frozen=True, slots=True)
class Call:
    """What a call asks for.

    Without `trains`, outputs are wanted, and no weights.  All processes must ask for the same, but
    for `trace`: the strongest that any of them asks for is what all record.
    """

    num_microbatches: int
    reduction: Reduce
    trains: bool = False
    loss_scale: float = 1.0
    trace: Trace = Trace.OFF


class Said(NamedTuple):
    """What one process says, all in numbers; -1 samples where it was given none."""

    number: float
    num_inputs: float
    num_targets: float
    raw_total: float
    loss_scale: float
    trace: float


def strength(trace: Trace) -> float:
    """Number a way to trace, so that the greater one records more."""
    return float(_BY_STRENGTH.index(trace))


def strongest_trace(everyone: Sequence[Said]) -> Trace:
    """Give what all record: the most that any process asks for."""
    return _BY_STRENGTH[int(max(said.trace for said in everyone))]


def check_same_call(everyone: Sequence[Said]) -> None:
    """See that all processes make the same call.

    Raises:
        MeshError: they do not, or scale the loss differently.
    """
    for rank, said in enumerate(everyone):
        first = everyone[0]
        if said.number != first.number:
            raise MeshError(
                f"the processes do not do the same: for rank 0 this is call {first.number:.0f}, "
                f"for rank {rank} call {said.number:.0f}. Every process must make every call, in "
                "the same order (no `if rank == 0` around a step)"
            )
        if said.loss_scale != first.loss_scale:
            raise MeshError(
                f"rank 0 scales its loss by {first.loss_scale:g}, rank {rank} by "
                f"{said.loss_scale:g}; gradients of both would be mixed. Give every process the "
                "same loss_scale: penstock.GradScaler decides it jointly, if every process makes "
                "one, and loads the same state"
            )


def num_samples(
    everyone: Sequence[Said], replica: int, ranks: Sequence[int], readers: Sequence[int]
) -> int:
    """Give N of a replica; `ranks[stage]` is who of its processes runs a stage, `readers` are
    those that read the inputs.

    Raises:
        BatchError: its processes were given different batches, or none where one is needed.
    """
    num_ranks = 1 + max(ranks)
    start = replica * num_ranks
    first, last = start + readers[0], start + ranks[-1]
    of_replica = f" of replica {replica}" if len(everyone) > num_ranks else ""
    for reader in readers:
        if everyone[start + reader].num_inputs < 0:
            stages = ", ".join(str(s) for s, rank in enumerate(ranks) if rank == reader)
            raise BatchError(
                f"rank {start + reader} runs stage {stages}{of_replica} and was given no inputs; "
                "give them on every rank, or at least where they are read"
            )
    count = int(everyone[first].num_inputs)
    rows = everyone[start : start + num_ranks]
    for rank, row in enumerate(rows, start):
        for what, number in (("inputs", row.num_inputs), ("targets", row.num_targets)):
            if number not in (-1.0, float(count)):
                raise BatchError(
                    f"rank {first} was given {count} inputs, rank {rank} {number:.0f} {what}; all "
                    "ranks of a replica must be given the same mini-batch"
                )
    if everyone[last].num_targets < 0 and any(row.num_targets >= 0 for row in rows):
        raise BatchError(
            f"rank {last} runs the last stage{of_replica} and was given no "
            "targets; give them on every rank, or at least there"
        )
    return count
