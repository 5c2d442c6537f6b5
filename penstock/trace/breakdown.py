"""Divide the time of a step: by stage, and by rank in the kinds that charts show.

The longest chain of work that its order and messages allow is the ideal step.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from fractions import Fraction
from numbers import Rational
from typing import cast

from penstock.schedules.ir import (
    Backward,
    BackwardInput,
    BackwardWeight,
    CommitStatistics,
    Compute,
    Fetch,
    Forward,
    Instruction,
    Message,
    Offload,
    Receive,
    Recompute,
    ReduceGradients,
    Schedule,
    Send,
    UpdateWeights,
    awaited_message,
    sent_message,
)
from penstock.schedules.walk import collection_paused, walk

from .looks import look_of
from .timeline import Span, Timeline
from .units import columns, percent_text, unit_for


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one stage in one step; they add up to the step on a rank with one stage."""

    stage: int
    rank: int
    forward_s: float
    recompute_s: float
    backward_s: float
    wait_s: float
    """Sends, receives after their message was sent (transfer and wake-up), and sums of gradients
    over replicas."""
    bubble_s: float
    """The rest of the step.  A rank with several stages counts idle time for the stage that runs
    next, and at the end for the one that ran last."""
    update_s: float = 0
    """The optimizer, in schedules that update weights."""

    @property
    def busy_s(self) -> float:
        """Seconds of layers, recomputes among them, and the optimizer."""
        return self.forward_s + self.recompute_s + self.backward_s + self.update_s


_SUMS = tuple(field.name for field in fields(StageTimes) if field.name.endswith("_s"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The times of all stages and their shares of the step; printing it gives a table."""

    stages: tuple[StageTimes, ...]
    num_ranks: int
    num_microbatches: int
    step_s: float
    ideal_step_s: float
    """The longest chain of work: the step with the same order on each rank, if messages took no
    time and each instruction began as soon as it could."""

    @property
    def utilisation(self) -> float:
        """Share of the ranks' time in which layers ran."""
        return share(sum(stage.busy_s for stage in self.stages), self.num_ranks * self.step_s)

    @property
    def wait(self) -> float:
        """Share of the ranks' time that messages took."""
        return share(sum(stage.wait_s for stage in self.stages), self.num_ranks * self.step_s)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they had nothing to do; exact if the times are."""
        return share(sum(stage.bubble_s for stage in self.stages), self.num_ranks * self.step_s)

    @property
    def ideal_utilisation(self) -> float:
        """Share of the ranks' time in which layers run in the ideal step.

        For p equal ranks with v stages each it is v m / (v m + p - 1).  Unequal stages lower it.
        Recomputes while ranks wait for gradients raise it.
        """
        busy_s = sum(stage.busy_s for stage in self.stages)
        return share(busy_s, self.num_ranks * self.ideal_step_s)

    @property
    def share_of_ideal(self) -> float:
        """Utilisation as a share of the ideal one, from 0 to 1; recomputes count as use.

        The rest is the time of messages and of late starts.
        """
        return share(self.ideal_step_s, self.step_s)

    def __str__(self) -> str:
        unit = unit_for(self.step_s)
        updates = any(stage.update_s for stage in self.stages)
        names = [field.name.removesuffix("_s") for field in fields(StageTimes)]
        rows = [names[: None if updates else -1]]
        for stage in self.stages:
            number, rank, *times_s = astuple(stage)[: len(rows[0])]
            times = (f"{float(time_s * unit.per_s):.3f}" for time_s in times_s)
            rows.append([str(number), str(rank), *times])
        title = f"step {float(self.step_s * unit.per_s):.3f} {unit.sign}; times in {unit.sign}"
        shares = (
            f"bubble {percent_text(self.bubble)}, waiting for messages {percent_text(self.wait)}, "
            f"utilisation {percent_text(self.utilisation)}: {percent_text(self.share_of_ideal)} "
            f"of the ideal {percent_text(self.ideal_utilisation)}"
        )
        return "\n".join([title, *columns(rows, num_left=0), shares])

    def to_json(self) -> str:
        """Write the seconds of each stage and the shares as one line of JSON."""
        return json.dumps(
            {
                **asdict(self),
                "bubble": self.bubble,
                "wait": self.wait,
                "utilisation": self.utilisation,
                "share_of_ideal": self.share_of_ideal,
            },
            default=float,  # Fractions
        )


@collection_paused()
def breakdown(timeline: Timeline) -> Breakdown:
    """Divide each rank's time between the step's first instruction and its last."""
    return Breakdown(
        stages=stages_of(timeline),
        num_ranks=timeline.num_ranks,
        num_microbatches=timeline.schedule.num_microbatches,
        step_s=timeline.step_s,
        ideal_step_s=longest_chain_s(timeline, works_s(timeline)),
    )


@collection_paused()
def bubble(timeline: Timeline) -> float:
    """Return `Breakdown.bubble` alone, in half the time: without the ideal step."""
    return share(
        sum(x.bubble_s for x in stages_of(timeline)), timeline.num_ranks * timeline.step_s
    )


def stages_of(timeline: Timeline) -> tuple[StageTimes, ...]:
    """Divide the time of each stage's rank."""
    totals: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(_SUMS, 0))
    ranks: dict[int, int] = {}
    last: dict[int, Span] = {}
    start_s, end_s = timeline.start_s, timeline.end_s
    # idle time before a span counts for its stage, after a rank's last span for that one's
    for span, wait_s in zip(timeline.spans, waits_s(timeline), strict=True):
        number, before = span.instruction.stage, last.get(span.rank)
        ranks[number], last[span.rank] = span.rank, span
        stage = totals[number]
        stage["bubble_s"] += span.start_s - (start_s if before is None else before.end_s)
        stage["wait_s"] += wait_s
        stage[look_of(span.instruction).counts_as] += span.duration_s - wait_s
    for span in last.values():
        totals[span.instruction.stage]["bubble_s"] += end_s - span.end_s
    return tuple(
        StageTimes(stage=number, rank=ranks[number], **sums)
        for number, sums in sorted(totals.items())
    )


def waits_s(timeline: Timeline) -> tuple[float, ...]:
    """Compute, for each span, the seconds at its end in which a message was on its way.

    A send counts whole, and a receive from the end of its send on.  A receive without a send in
    the timeline counts as waiting for the sender throughout.
    """
    sent_s = {sent_message(span.instruction): span.end_s for span in timeline.spans}

    def wait_s(span: Span) -> float:
        if isinstance(span.instruction, Send):
            return span.duration_s
        if not isinstance(span.instruction, Receive):
            return 0
        since_s = sent_s.get(span.instruction.message, span.end_s)
        return max(0, span.end_s - max(span.start_s, since_s))

    return tuple(wait_s(span) for span in timeline.spans)


def share(part: float, whole: float) -> float:
    """Divide, exactly into a Fraction if both numbers are exact; the share of nothing is 0."""
    if not whole:
        return 0
    if isinstance(part, Rational) and isinstance(whole, Rational):
        return cast(float, Fraction(part, whole))
    return part / whole


def works_s(timeline: Timeline) -> tuple[float, ...]:
    """Return the seconds of each span that ran layers, their statistics or the optimizer."""
    return tuple(
        span.duration_s if isinstance(span.instruction, _WORK) else 0 for span in timeline.spans
    )


_WORK = (Compute, CommitStatistics, UpdateWeights)


def longest_chain_s(timeline: Timeline, durations_s: Sequence[float]) -> float:
    """Compute the length of the step if each span took its entry of `durations_s`.

    Each instruction begins as soon as its rank is free and its message is there; messages take no
    time.  A receive without a send in the timeline waits for nothing.
    """
    # 1. the programs, without receives that nothing is sent to
    num_ranks = timeline.num_ranks
    programs: list[list[Instruction]] = [[] for _ in range(num_ranks)]
    of_ranks: list[list[float]] = [[] for _ in range(num_ranks)]
    sent = {None, *(sent_message(span.instruction) for span in timeline.spans)}
    for span, duration_s in zip(timeline.spans, durations_s, strict=True):
        if awaited_message(span.instruction) in sent:
            programs[span.rank].append(span.instruction)
            of_ranks[span.rank].append(duration_s)
    # 2. run them, sends before their receives
    next_s = [iter(of_rank) for of_rank in of_ranks]
    arrival_s: dict[Message, float] = {}
    free_s: list[float] = [0] * num_ranks
    for rank, instruction in walk(Schedule(tuple(map(tuple, programs)))):
        awaited = awaited_message(instruction)
        if awaited is not None:
            free_s[rank] = max(free_s[rank], arrival_s.pop(awaited))
        free_s[rank] += next(next_s[rank])
        message = sent_message(instruction)
        if message is not None:
            arrival_s[message] = free_s[rank]
    return max(free_s, default=0)


_FIELDS: dict[type[Instruction], str] = {
    Forward: "forward_s",
    CommitStatistics: "forward_s",
    Recompute: "recompute_s",
    Backward: "backward_s",
    BackwardInput: "backward_s",
    BackwardWeight: "weight_s",
    ReduceGradients: "reduction_s",
    Offload: "communication_s",
    Fetch: "communication_s",
    UpdateWeights: "optimizer_s",
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
    keys = [(type(x), x.microbatch if isinstance(x, Compute) else None) for x in instructions]
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
