"""Activation memory of a rank after each instruction, in bytes, and versions of its weights."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.errors import ConfigError

from . import ir
from .costs import one_each
from .ir import ADDS_GRADIENTS, Forward, Instruction, Program, Schedule, UpdateWeights

BytesPerStage = int | tuple[int, ...]
"""One number for all stages, or one for each."""
BytesPerRank = int | tuple[int, ...]
"""One number for all ranks, or one for each."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that one stage keeps of one micro-batch; the fields of `Sizes`, for one stage."""

    graph: int
    inputs: int
    weights: int
    stays: int = 0

    def moves(self, *, keeps_graph: bool) -> int:
        """Return the bytes that an Offload moves away."""
        return max(0, (self.graph if keeps_graph else self.inputs) - self.stays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes that a stage keeps of one micro-batch.

    Raises:
        ConfigError: a number is negative.
    """

    kept_bytes: BytesPerStage
    """The graph of a forward."""
    input_bytes: BytesPerStage = 0
    """The part that a Forward without its graph keeps until the Recompute."""
    weight_bytes: BytesPerStage | None = None
    """The part that a BackwardInput leaves for its BackwardWeight.  None is a guess, as much as
    the graph.  It is no bound: with gradients beside the graph it may be twice as much."""
    stay_bytes: BytesPerStage = 0
    """The part that an Offload leaves on the device: the caller's batch."""

    def __post_init__(self) -> None:
        for name in ("kept_bytes", "input_bytes", "weight_bytes", "stay_bytes"):
            size = getattr(self, name)
            if min(size if isinstance(size, tuple) else (size or 0,), default=0) < 0:
                raise ConfigError(f"{name} is {size}: nothing takes less than 0 bytes")

    def of_stages(self, num_stages: int) -> tuple[Kept, ...]:
        """Return the sizes of each stage.

        Raises:
            ConfigError: sizes are given for another number of stages.
        """
        left = self.kept_bytes if self.weight_bytes is None else self.weight_bytes
        graphs = one_each(self.kept_bytes, num_stages, "Sizes.kept_bytes")
        inputs = one_each(self.input_bytes, num_stages, "Sizes.input_bytes")
        weights = one_each(left, num_stages, "Sizes.weight_bytes")
        stays = one_each(self.stay_bytes, num_stages, "Sizes.stay_bytes")
        return tuple(map(Kept, graphs, inputs, weights, stays))


CHANGES: Mapping[type[Instruction], Callable[[Kept], int]] = {
    ir.Forward: lambda kept: kept.graph,
    ir.Recompute: lambda kept: kept.graph - kept.inputs,
    ir.Backward: lambda kept: -kept.graph,
    ir.BackwardInput: lambda kept: kept.weights - kept.graph,
    ir.BackwardWeight: lambda kept: -kept.weights,
}
"""The bytes that each kind of instruction adds to the activation memory; others add none."""


def live_bytes(program: Program, kept: Sequence[Kept]) -> Iterator[int]:
    """Yield the activation memory of the rank that runs `program` after each instruction."""
    dropped: set[tuple[int, int]] = set()  # (stage, micro-batch) of forwards without their graph
    changes = {kind: [of(sizes) for sizes in kept] for kind, of in CHANGES.items()}

    def change(instruction: Instruction) -> int:
        kind, stage = instruction.__class__, instruction.stage
        if isinstance(instruction, Forward) and not instruction.keep_graph:
            dropped.add((stage, instruction.microbatch))
            return kept[stage].inputs
        if kind in changes:
            return changes[kind][stage]
        if isinstance(instruction, ir.Offload | ir.Fetch):
            keeps_graph = (stage, instruction.microbatch) not in dropped
            moved = kept[stage].moves(keeps_graph=keeps_graph)
            return moved if isinstance(instruction, ir.Fetch) else -moved
        return 0

    return accumulate(map(change, program))


def peak_bytes(schedule: Schedule, sizes: Sizes) -> tuple[int, ...]:
    """Return the peak activation memory of each rank.

    Raises:
        ConfigError: sizes are given for another number of stages.
    """
    kept = sizes.of_stages(schedule.num_stages)
    return tuple(max(live_bytes(program, kept), default=0) for program in schedule.programs)


def uses_of_versions(schedule: Schedule) -> dict[int, Counter[int]]:
    """Count, for each stage that updates its weights, the micro-batches that need each version."""
    updated = {x.stage for x in schedule.instructions if isinstance(x, UpdateWeights)}
    uses: dict[int, Counter[int]] = {stage: Counter() for stage in updated}
    for x in schedule.instructions:
        if isinstance(x, Forward) and x.stage in updated:
            uses[x.stage][x.version] += 1
    return uses


def num_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return the largest number of weight versions on each stage at one time, at least 1."""
    most = [1] * schedule.num_stages
    for stage, waiting in uses_of_versions(schedule).items():
        # walk the stage's program: `waiting` counts the backwards left for each version
        newest, version_of = 0, {}
        for x in schedule.programs[schedule.ranks[stage]]:
            if x.stage != stage:
                continue
            if isinstance(x, Forward):
                version_of[x.microbatch] = x.version
            elif isinstance(x, ADDS_GRADIENTS):
                waiting[version_of[x.microbatch]] -= 1
            elif isinstance(x, UpdateWeights):
                newest += 1
                older = sum(1 for version, left in waiting.items() if left and version < newest)
                most[stage] = max(most[stage], 1 + older)
    return tuple(most)


def version_bytes(schedule: Schedule, parameter_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the peak bytes of each stage's weight versions beside the newest."""
    pairs = zip(num_versions(schedule), parameter_bytes, strict=True)
    return tuple((number - 1) * size for number, size in pairs)
