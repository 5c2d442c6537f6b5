"""What a rank keeps for its backwards, in bytes, after each instruction of its program; and how
many versions of its weights.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.errors import ConfigError

from . import ir
from .ir import ADDS_GRADIENTS, Forward, Instruction, Program, Schedule, UpdateWeights

BytesPerStage = int | tuple[int, ...]
"""One number for all stages, or one for each."""
BytesPerRank = int | tuple[int, ...]
"""One number for all ranks, or one for each."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that one stage keeps of one micro-batch: its graph, or less of it."""

    graph: int
    inputs: int
    weights: int
    stays: int = 0

    def moves(self, *, keeps_graph: bool) -> int:
        """Return how much of it an Offload moves away."""
        return max(0, (self.graph if keeps_graph else self.inputs) - self.stays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes that a stage keeps of one micro-batch.

    `kept_bytes` is the graph of a forward, `input_bytes` what a Forward that drops its graph keeps
    until the Recompute, `weight_bytes` what a BackwardInput leaves for its BackwardWeight.  None
    is a guess, as much as the graph, and no bound: gradients are kept there that the graph has
    not, and a stage may keep twice as much.  `stay_bytes` is what an Offload leaves where it
    is: the caller's batch.

    Raises:
        ConfigError: a number is negative.
    """

    kept_bytes: BytesPerStage
    input_bytes: BytesPerStage = 0
    weight_bytes: BytesPerStage | None = None
    stay_bytes: BytesPerStage = 0

    def __post_init__(self) -> None:
        for name in ("kept_bytes", "input_bytes", "weight_bytes", "stay_bytes"):
            given = getattr(self, name)
            if min(given if isinstance(given, tuple) else (given or 0,), default=0) < 0:
                raise ConfigError(f"{name} is {given}: nothing takes less than 0 bytes")

    def of_stages(self, num_stages: int) -> tuple[Kept, ...]:
        """Return what each stage keeps.

        Raises:
            ConfigError: sizes are given for another number of stages.
        """
        graphs = _each(self.kept_bytes, num_stages, "kept_bytes")
        inputs = _each(self.input_bytes, num_stages, "input_bytes")
        left = self.weight_bytes
        weights = graphs if left is None else _each(left, num_stages, "weight_bytes")
        stays = _each(self.stay_bytes, num_stages, "stay_bytes")
        return tuple(map(Kept, graphs, inputs, weights, stays))


CHANGES: Mapping[type[Instruction], Callable[[Kept], int]] = {
    ir.Forward: lambda kept: kept.graph,
    ir.Recompute: lambda kept: kept.graph - kept.inputs,
    ir.Backward: lambda kept: -kept.graph,
    ir.BackwardInput: lambda kept: kept.weights - kept.graph,
    ir.BackwardWeight: lambda kept: -kept.weights,
}
"""By how many bytes each kind of instruction changes what is kept; others change nothing."""


def live_bytes(program: Program, kept: Sequence[Kept]) -> Iterator[int]:
    """Yield what the rank that runs `program` keeps after each instruction."""
    dropped: set[tuple[int, int]] = set()
    changes = {kind: [of(each) for each in kept] for kind, of in CHANGES.items()}

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
    """Return the most that each rank keeps at once.

    Raises:
        ConfigError: sizes are given for another number of stages.
    """
    kept = sizes.of_stages(schedule.num_stages)
    return tuple(max(live_bytes(program, kept), default=0) for program in schedule.programs)


def _each(given: BytesPerStage, num_stages: int, name: str) -> tuple[int, ...]:
    each = given if isinstance(given, tuple) else (given,) * num_stages
    if len(each) != num_stages:
        raise ConfigError(
            f"Sizes.{name} has {len(each)} entries, the schedule has {num_stages} stages: give "
            "one number for each stage, or one for all"
        )
    return each


def uses_of_versions(schedule: Schedule) -> dict[int, Counter[int]]:
    """Count, for each stage that updates its weights, the micro-batches that need each version."""
    updated = {x.stage for x in schedule.instructions if isinstance(x, UpdateWeights)}
    uses: dict[int, Counter[int]] = {stage: Counter() for stage in updated}
    for x in schedule.instructions:
        if isinstance(x, Forward) and x.stage in updated:
            uses[x.stage][x.version] += 1
    return uses


def num_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage the most versions of its weights that are there at once: 1 where
    nothing updates them, or nothing needs an old one.
    """
    most = [1] * schedule.num_stages
    for stage, waiting in uses_of_versions(schedule).items():
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
    """Return the bytes of each stage's versions beside the newest, at the most."""
    pairs = zip(num_versions(schedule), parameter_bytes, strict=True)
    return tuple((number - 1) * size for number, size in pairs)
