"""A step as sections of a page: its timeline, the time of each rank by kind, and memory."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.trace.advice import advice
from penstock.trace.breakdown import Breakdown, RankTimes, kinds_of, mean_times, rank_times
from penstock.trace.looks import PARTS
from penstock.trace.timeline import MemoryKind, Span, Timeline
from penstock.trace.units import percent_text, time_text, unit_for

from .charts import memory_chart, spread, time_chart
from .lane_chart import lane_chart
from .page import Fact, Figure, Page, Section, Table, Text

MOST_ROWS = 24
"""Rows of a table of ranks."""
_HINT = (
    "Drag to zoom, shift and drag to move, double-click for the whole step; or click into the "
    "chart and press + and -, the arrow keys, and 0 for the whole step. A click in the legend "
    "hides a kind."
)
_MOVED = (
    "Tracing memory slows a step, so the bytes were traced in an earlier step. They are drawn at "
    "the same instructions of the timed step."
)
_OTHER_STEP = "The bytes and the times are of another step than the timeline, so the axis differs."
_IMBALANCE = "Load imbalance is idle time beyond that of equal stages; bubble is other idle time."


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step, predicted or measured or both; the page leaves out None and empty values."""

    predicted: Timeline | None = None
    measured: Timeline | None = None
    optimizer_s: float = 0.0
    """Seconds of the optimizer outside of the timeline: measured, or else predicted."""
    set_up_s: float = 0.0
    """Seconds outside of the measured timeline for all else."""
    memory: Timeline | None = None
    """The step whose memory was traced; None: `measured`.  If both ran the same instructions, its
    bytes are drawn at the times of `measured`."""
    memory_limits_bytes: tuple[int, ...] = ()
    """The memory of each rank's device."""
    kept_limits_bytes: tuple[int, ...] = ()
    """The limit of each rank's activation memory."""


def with_step(page: Page, step: Step) -> Page:
    """Add a step to a page: its figures after those there, its sections before them."""
    both = {"predicted": step.predicted, "measured": step.measured}
    timelines = {title: t for title, t in both.items() if t is not None and t.step_s}
    breakdowns = {title: timeline.breakdown() for title, timeline in timelines.items()}
    sections = (*_sections(step, timelines, breakdowns), *page.sections)
    facts = (*page.facts, *_facts(step, breakdowns))
    return replace(page, facts=facts, sections=sections, advice=page.advice or _advice(step))


def _advice(step: Step) -> str:
    """Return the advice on the largest cost of a measured step; a plan explains itself."""
    timeline, _ = _measured_memory(step)
    if step.measured is None or timeline is None:
        return ""
    found = advice(
        timeline if timeline.schedule == step.measured.schedule else step.measured,
        optimizer_s=step.optimizer_s,
        set_up_s=step.set_up_s,
        limits_bytes=step.kept_limits_bytes,
    )
    return found[0].text if found else ""


def _facts(step: Step, breakdowns: Mapping[str, Breakdown]) -> Iterator[Fact]:
    """Yield the figures of the measured step, or else of the predicted one."""
    predicted, measured = breakdowns.get("predicted"), breakdowns.get("measured")
    parts = measured or predicted
    if parts is None:
        return
    step_s, remark = parts.step_s, ""
    if measured and predicted:
        missed = float(step_s / predicted.step_s) - 1
        remark = f"{time_text(predicted.step_s)} predicted, {missed:+.1%}"
    elif measured and step.optimizer_s + step.set_up_s:
        remark = f"and {time_text(step.optimizer_s + step.set_up_s)} for optimizer and set-up"
    elif not measured and step.optimizer_s:
        step_s += step.optimizer_s
        remark = f"{time_text(step.optimizer_s)} of it the optimizer"
    yield Fact("timed step" if measured else "predicted step", time_text(step_s), remark)
    ideal = percent_text(1 - parts.ideal_utilisation)
    yield Fact("bubble", percent_text(parts.bubble), f"{ideal} without messages")


def _sections(
    step: Step, timelines: Mapping[str, Timeline], breakdowns: Mapping[str, Breakdown]
) -> Iterator[Section]:
    if timelines:
        bubbles = {title: parts.bubble for title, parts in breakdowns.items()}
        after_s = step.optimizer_s if step.measured is None else 0.0
        lanes = lane_chart(timelines, bubbles, optimizer_s=after_s)
        times = {title: rank_times(timeline) for title, timeline in timelines.items()}
        yield Section("Timeline", (Text(_HINT, "hint"), lanes))
        main = "predicted" if step.measured is None else "measured"
        if main in times:
            rest = {"optimizer_s": step.optimizer_s, "set_up_s": step.set_up_s}
            times[main] = tuple(rank.with_rest(**rest) for rank in times[main])
        titles = {title: title.capitalize() if len(times) > 1 else "" for title in times}
        tables = (time_table(ranks, titles[title]) for title, ranks in times.items())
        is_uneven = any(rank.imbalance_s for ranks in times.values() for rank in ranks)
        note = (Text(_IMBALANCE, "note"),) if is_uneven else ()
        yield Section("Where the time goes", (time_chart(times), *tables, *note))
    axis_s = max((float(timeline.step_s) for timeline in timelines.values()), default=0.0)
    memory = tuple(_memory(step, axis_s))
    if memory:
        yield Section("Memory", memory)


def _memory(step: Step, axis_s: float) -> Iterator[Figure]:
    """Draw predicted and measured memory with its limits, on the timeline's axis."""
    measured, remark = _measured_memory(step)
    for title, timeline in {"predicted": step.predicted, "measured": measured}.items():
        if timeline is None or not timeline.memory:
            continue
        kept_only = title == "measured" and bool(step.kept_limits_bytes)
        limits = step.kept_limits_bytes if kept_only else step.memory_limits_bytes
        if kept_only:
            kept = (m for m in timeline.memory if m.kind is MemoryKind.ACTIVATIONS)
            timeline = replace(timeline, memory=tuple(kept))
        content = "kept for backward passes" if kept_only else "all memory"
        is_shared = title == "predicted" or remark != _OTHER_STEP
        axis = axis_s if is_shared and axis_s else None
        chart = memory_chart(timeline, limits, f"memory-{title}", axis_s=axis)
        note = " ".join(filter(None, (remark if title == "measured" else "", chart.note)))
        yield replace(chart, title=f"{title.capitalize()}: {content}", note=note)


def _measured_memory(step: Step) -> tuple[Timeline | None, str]:
    """Return the timeline that has the measured memory, and a remark on its step."""
    traced, timed = step.memory, step.measured
    if traced is None or traced == timed:
        return timed, ""
    moved = None if timed is None else memory_moved(traced, timed)
    return (traced, _OTHER_STEP) if moved is None else (moved, _MOVED)


def time_table(times: Sequence[RankTimes], title: str = "") -> Table:
    """Tabulate the times of at most MOST_ROWS ranks, evenly chosen, and the mean of all."""
    kinds, mean = kinds_of(times), mean_times(times)
    unit = unit_for(max(float(rank.total_s) for rank in times))
    total_s = sum(mean.values())

    def row(name: str, values_s: Sequence[float]) -> tuple[str, ...]:
        return (name, *(f"{float(value_s * unit.per_s):.2f}" for value_s in values_s))

    rows = [
        row(f"rank {rank.rank}", [*(getattr(rank, kind) for kind in kinds), rank.total_s])
        for rank in (times[n] for n in spread(len(times), MOST_ROWS))
    ]
    rows.append(row(f"mean of {len(times):,}", [*(mean[kind] for kind in kinds), total_s]))
    shares = (percent_text(mean[kind] / (total_s or 1)) for kind in kinds)
    rows.append(("share of the step", *shares, percent_text(1)))
    names = (PARTS[kind].name for kind in kinds)
    return Table((f"times in {unit.sign}", *names, "step"), tuple(rows), title)


def memory_moved(traced: Timeline, timed: Timeline) -> Timeline | None:
    """Return `timed` with the memory samples of `traced`, each at the same place of its rank.

    A sample inside an instruction, or between two, keeps its share of that time.

    traced   |  F0  | F1 |...| B0  |        a sample at 1/2 of F1
    timed    | F0 | F1|......|B0|           is also at 1/2 of F1

    Returns:
        None if the ranks of both steps did not run the same instructions in the same order.
    """
    if traced.schedule != timed.schedule:
        return None
    rank_of = {span.instruction.stage: span.rank for span in traced.spans}
    old_s, new_s = _marks(traced), _marks(timed)

    def moved_s(rank: int, time_s: float) -> float:
        old, new = old_s[rank], new_s[rank]
        n = bisect_right(old, time_s)
        if n == 0:
            return timed.start_s
        if n == len(old):
            return min(new[-1] + time_s - old[-1], timed.end_s)
        share = (time_s - old[n - 1]) / (old[n] - old[n - 1])
        return new[n - 1] + share * (new[n] - new[n - 1])

    memory = (
        replace(sample, time_s=moved_s(rank_of[sample.stage], sample.time_s))
        for sample in traced.memory
        if sample.stage in rank_of
    )
    return replace(timed, memory=tuple(memory))


def _marks(timeline: Timeline) -> dict[int, list[float]]:
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.rank].append(span)
    return {
        rank: [time_s for span in of_rank for time_s in (span.start_s, span.end_s)]
        for rank, of_rank in spans.items()
    }
