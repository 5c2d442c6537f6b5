"""Where each rank's time went, by kind: the paper's chart, and what it leaves out."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace

from penstock.schedules import ir
from penstock.schedules.collection import collection_paused

from .breakdown import longest_chain_s, share, waits_s, works_s
from .timeline import Timeline

_FIELDS: dict[type[ir.Instruction], str] = {
    ir.Forward: "forward_s",
    ir.CommitStatistics: "forward_s",
    ir.Recompute: "recompute_s",
    ir.Backward: "backward_s",
    ir.BackwardInput: "backward_s",
    ir.BackwardWeight: "weight_s",
    ir.ReduceGradients: "reduction_s",
    ir.Offload: "communication_s",
    ir.Fetch: "communication_s",
    ir.UpdateWeights: "optimizer_s",
}
"""What the work of an instruction counts as; of the others only waiting for messages counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Seconds of one rank in one step, by kind; they add up to the step.

    forward, recompute, backward    layers ran, and running statistics moved; a backward whole, or
                                    its part for gradients of inputs
    weight          the other part of backwards: gradients of weights
    communication   sends, receives after their message was sent, moving to and from the host
    bubble          idle, as with equal stages; and idle because messages were late elsewhere
    imbalance       idle beyond that: what unequal stages add
    reduction       gradients were summed over replicas
    optimizer       weights were moved
    set_up          before the first instruction of a step, and between its parts

    `imbalance_s` is how much longer this rank is idle than it would be with equal stages, both
    without messages: each instruction's work is replaced by the mean, over the stages, of the same
    instruction of the same micro-batch, and the programs run in the same order.  It is 0 where
    stages are equal, and never more than the rank was idle.
    """

    rank: int
    forward_s: float = 0
    recompute_s: float = 0
    backward_s: float = 0
    weight_s: float = 0
    communication_s: float = 0
    bubble_s: float = 0
    imbalance_s: float = 0
    reduction_s: float = 0
    optimizer_s: float = 0
    set_up_s: float = 0

    @property
    def total_s(self) -> float:
        """The whole step."""
        times_s: tuple[float, ...] = astuple(self)[1:]
        return sum(times_s)

    def with_rest(self, *, optimizer_s: float, set_up_s: float) -> "RankTimes":
        """Add what a step spent outside of its timeline."""
        return replace(
            self,
            optimizer_s=self.optimizer_s + optimizer_s,
            set_up_s=self.set_up_s + set_up_s,
        )


KINDS = tuple(field.name for field in fields(RankTimes) if field.name.endswith("_s"))
"""The names of the kinds, in the order in which they are shown."""


@collection_paused()
def rank_times(timeline: Timeline) -> tuple[RankTimes, ...]:
    """Say where each rank's time went between the step's first instruction and its last."""
    sums: list[dict[str, float]] = [dict.fromkeys(KINDS, 0) for _ in range(timeline.num_ranks)]
    for span, wait_s in zip(timeline.spans, waits_s(timeline), strict=True):
        times = sums[span.rank]
        times["communication_s"] += wait_s
        name = _FIELDS.get(type(span.instruction))
        if name is not None:
            times[name] += span.duration_s - wait_s
    step_s = timeline.step_s
    idle_s = [step_s - sum(times.values()) for times in sums]
    imbalance_s = _imbalance_s(timeline)
    for times, idle, more in zip(sums, idle_s, imbalance_s, strict=True):
        times["imbalance_s"] = min(max(idle, 0), more)
        times["bubble_s"] = max(idle, 0) - times["imbalance_s"]
    return tuple(RankTimes(rank=rank, **times) for rank, times in enumerate(sums))


def mean_times(times: Sequence[RankTimes]) -> dict[str, float]:
    """Compute the mean over ranks of each kind."""
    return {name: share(sum(getattr(t, name) for t in times), len(times)) for name in KINDS}


def kinds_of(times: Sequence[RankTimes]) -> list[str]:
    """Return the kinds that any rank has some time of."""
    return [kind for kind in KINDS if any(getattr(rank, kind) for rank in times)]


def _imbalance_s(timeline: Timeline) -> list[float]:
    """Compute how much longer each rank is idle than with equal stages, without messages."""
    own, equal = works_s(timeline), _equal_works_s(timeline)
    own_step_s, equal_step_s = longest_chain_s(timeline, own), longest_chain_s(timeline, equal)
    busy_s: list[float] = [0] * timeline.num_ranks
    equal_busy_s: list[float] = [0] * timeline.num_ranks
    for span, own_s, equal_s in zip(timeline.spans, own, equal, strict=True):
        busy_s[span.rank] += own_s
        equal_busy_s[span.rank] += equal_s
    return [
        max(0, (own_step_s - own_s) - (equal_step_s - equal_s))
        for own_s, equal_s in zip(busy_s, equal_busy_s, strict=True)
    ]


def _equal_works_s(timeline: Timeline) -> list[float]:
    """Return each span's work if all stages took as long for the same of a micro-batch."""
    groups: dict[tuple[type, int | None], list[float]] = defaultdict(list)
    keys = [
        (
            type(span.instruction),
            span.instruction.microbatch if isinstance(span.instruction, ir.Compute) else None,
        )
        for span in timeline.spans
    ]
    for key, work_s in zip(keys, works_s(timeline), strict=True):
        groups[key].append(work_s)
    means = {key: share(sum(works), len(works)) for key, works in groups.items()}
    return [means[key] for key in keys]
