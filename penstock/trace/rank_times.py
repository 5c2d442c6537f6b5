"""Divide each rank's time by kind: the paper's chart, and the kinds that it leaves out."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace

from penstock.schedules import ir
from penstock.schedules.walk import collection_paused

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
"""The kind of each instruction's work; sends and receives count only while a message moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Seconds of one rank in one step, by kind; they add up to the step."""

    rank: int
    forward_s: float = 0
    """Forwards, and updates of running statistics."""
    recompute_s: float = 0
    backward_s: float = 0
    """Whole backwards, and the parts for gradients of inputs."""
    weight_s: float = 0
    """The parts of backwards for gradients of weights."""
    communication_s: float = 0
    """Sends, receives after their message was sent, and moves to and from the host."""
    bubble_s: float = 0
    """Idle time, as with equal stages, and because of late messages elsewhere."""
    imbalance_s: float = 0
    """The additional idle time of unequal stages, both without messages.  Equal stages have, for
    each instruction, the mean work of the same kind and micro-batch over the stages."""
    reduction_s: float = 0
    """Sums of gradients over replicas."""
    optimizer_s: float = 0
    set_up_s: float = 0
    """The time before the first instruction of a step, and between its parts."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole step."""
        times_s: tuple[float, ...] = astuple(self)[1:]
        return sum(times_s)

    def with_rest(self, *, optimizer_s: float, set_up_s: float) -> "RankTimes":
        """Add the times outside of the timeline."""
        return replace(
            self,
            optimizer_s=self.optimizer_s + optimizer_s,
            set_up_s=self.set_up_s + set_up_s,
        )


KINDS = tuple(field.name for field in fields(RankTimes) if field.name.endswith("_s"))
"""The names of the kinds, in the order in which they are shown."""


@collection_paused()
def rank_times(timeline: Timeline) -> tuple[RankTimes, ...]:
    """Divide each rank's time between the step's first instruction and its last."""
    sums: list[dict[str, float]] = [dict.fromkeys(KINDS, 0) for _ in range(timeline.num_ranks)]
    for span, wait_s in zip(timeline.spans, waits_s(timeline), strict=True):
        times = sums[span.rank]
        times["communication_s"] += wait_s
        name = _FIELDS.get(type(span.instruction))
        if name is not None:
            times[name] += span.duration_s - wait_s
    # idle time is imbalance as far as unequal stages explain it, and else bubble
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
    """Compute each rank's idle time beyond that of equal stages, both without messages."""
    # 1. give each instruction the mean work of its kind and micro-batch over the stages
    works = works_s(timeline)
    instructions = [span.instruction for span in timeline.spans]
    keys = [(type(x), x.microbatch if isinstance(x, ir.Compute) else None) for x in instructions]
    groups: dict[tuple[type, int | None], list[float]] = defaultdict(list)
    for key, work_s in zip(keys, works, strict=True):
        groups[key].append(work_s)
    means = {key: share(sum(times), len(times)) for key, times in groups.items()}
    equal_works = [means[key] for key in keys]

    # 2. compare idle times, in programs of the same order
    step_s, equal_step_s = (longest_chain_s(timeline, x) for x in (works, equal_works))
    busy_s: list[float] = [0] * timeline.num_ranks
    equal_busy_s: list[float] = [0] * timeline.num_ranks
    for span, work_s, equal_work_s in zip(timeline.spans, works, equal_works, strict=True):
        busy_s[span.rank] += work_s
        equal_busy_s[span.rank] += equal_work_s
    return [
        max(0, (step_s - work_s) - (equal_step_s - equal_work_s))
        for work_s, equal_work_s in zip(busy_s, equal_busy_s, strict=True)
    ]
