"""The chart and the table of where each rank's time went, and how a measured step differs from
what was predicted of it, with names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.schedules.ir import Compute, UpdateWeights
from penstock.trace.looks import PARTS, look_of
from penstock.trace.rank_times import KINDS, RankTimes, mean_times
from penstock.trace.timeline import Span, Timeline
from penstock.trace.units import number_text, percent_text, time_text, unit_for

from .lane_chart import spread
from .markup import Figure, Trace, layout_of, rounded
from .page import Table

MOST_BARS, MOST_ROWS = 64, 24
_BAR_PX = 26

Times = Mapping[str, Sequence[RankTimes]]
"""Those of each rank, by what they are of: predicted, measured."""


def time_chart(times: Times) -> Figure:
    """Draw a stacked bar for each rank, for a predicted step beside that of the measured one."""
    num_ranks = max(map(len, times.values()))
    ranks = spread(num_ranks, MOST_BARS // len(times))
    bars = [
        (f"rank {n} {title}" if len(times) > 1 else f"rank {n}", of_ranks[n])
        for n in ranks
        for title, of_ranks in times.items()
        if n < len(of_ranks)
    ]
    unit = unit_for(max(float(bar.total_s) for _, bar in bars))
    data: list[Trace] = []
    for kind in _kinds_of([bar for _, bar in bars]):
        look = PARTS[kind]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": look.name,
                "y": list(range(len(bars))),
                "x": [rounded(getattr(bar, kind) * unit.per_s) for _, bar in bars],
                "width": 0.76,
                "marker": {"color": look.fill, "line": {"width": 0.5}},
                "customdata": [
                    f"{name}<br>{number_text(float(getattr(bar, kind) * unit.per_s))} "
                    f"{unit.sign}, {percent_text(_share(bar, kind))} of the step"
                    for name, bar in bars
                ],
                "hovertemplate": f"<b>{look.name}</b>, %{{customdata}}<extra></extra>",
            }
        )
    layout = layout_of(len(bars) * _BAR_PX + 94, barmode="stack")
    layout["margin"] = {**layout["margin"], "l": 74 if len(times) == 1 else 128, "t": 40}
    layout["xaxis"] = {"title": {"text": f"time ({unit.sign})", "standoff": 12}, "zeroline": False}
    layout["yaxis"] = {
        "range": [len(bars) - 0.5, -0.5],
        "tickvals": list(range(len(bars))),
        "ticktext": [name for name, _ in bars],
        "fixedrange": True,
        "automargin": True,
        "showgrid": False,
        "zeroline": False,
    }
    note = ""
    if len(ranks) < num_ranks:
        note = f"{len(ranks)} of {num_ranks:,} ranks are drawn, evenly chosen."
    return Figure(tuple(data), layout, note)


def time_table(times: Sequence[RankTimes]) -> Table:
    """Write the times of ranks, evenly chosen where they are many, and the mean of all."""
    kinds = _kinds_of(times)
    unit = unit_for(max(float(rank.total_s) for rank in times))
    mean = mean_times(times)

    def cells(values: Mapping[str, float]) -> list[str]:
        return [f"{float(values[kind] * unit.per_s):.2f}" for kind in kinds]

    rows = [
        (
            f"rank {rank.rank}",
            *cells({kind: getattr(rank, kind) for kind in kinds}),
            f"{float(rank.total_s * unit.per_s):.2f}",
        )
        for rank in (times[n] for n in spread(len(times), MOST_ROWS))
    ]
    total_s = sum(mean.values())
    rows.append((f"mean of {len(times):,}", *cells(mean), f"{float(total_s * unit.per_s):.2f}"))
    shares = [percent_text(mean[kind] / total_s if total_s else 0) for kind in kinds]
    rows.append(("share of the step", *shares, percent_text(1)))
    names = (PARTS[kind].name for kind in kinds)
    return Table((f"times in {unit.sign}", *names, "step"), tuple(rows))


def _kinds_of(times: Sequence[RankTimes]) -> list[str]:
    """Return the kinds that any rank has some time of."""
    return [kind for kind in KINDS if any(getattr(rank, kind) for rank in times)]


def _share(rank: RankTimes, kind: str) -> float:
    return getattr(rank, kind) / rank.total_s if rank.total_s else 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Seconds of one thing, predicted and measured."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def missed_s(self) -> float:
        """How much longer it took than predicted."""
        return self.measured_s - self.predicted_s


def differences(
    predicted: Timeline, measured: Timeline, times: Mapping[str, Sequence[RankTimes]]
) -> tuple[Difference, ...]:
    """Compare the step, the mean over ranks of each kind of time, and the instructions.

    `times` are those of "predicted" and "measured".  Of the instructions that run layers or move
    weights and are in both timelines, the one that was missed by most is named.
    """
    found = [Difference("step", predicted.step_s, measured.step_s)]
    told, seen = mean_times(times["predicted"]), mean_times(times["measured"])
    found += [
        Difference(f"{PARTS[kind].name}, mean of the ranks", told[kind], seen[kind])
        for kind in KINDS
        if told[kind] or seen[kind]
    ]
    return (*found, *_largest(predicted, measured))


def _largest(predicted: Timeline, measured: Timeline) -> tuple[Difference, ...]:
    """Return the instruction whose duration was missed by most, if the two have one in common."""
    told = {(span.rank, str(span.instruction)): span for span in _of_work(predicted)}
    pairs = [
        Difference(_name(span), told[key].duration_s, span.duration_s)
        for span in _of_work(measured)
        if (key := (span.rank, str(span.instruction))) in told
    ]
    return (max(pairs, key=lambda pair: abs(pair.missed_s)),) if pairs else ()


def _of_work(timeline: Timeline) -> list[Span]:
    return [s for s in timeline.spans if isinstance(s.instruction, Compute | UpdateWeights)]


def _name(span: Span) -> str:
    what = f"most missed: {look_of(span.instruction).name} of stage {span.instruction.stage}"
    if isinstance(span.instruction, Compute):
        what += f", micro-batch {span.instruction.microbatch}"
    return f"{what} on rank {span.rank}"


def difference_table(found: Sequence[Difference]) -> Table:
    """Write what was compared, and how much longer it took than predicted."""
    return Table(
        ("", "predicted", "measured", "difference", ""),
        tuple(
            (
                each.name,
                time_text(each.predicted_s),
                time_text(each.measured_s),
                _signed(each.missed_s),
                f"{each.missed_s / each.predicted_s:+.1%}" if each.predicted_s else "-",
            )
            for each in found
        ),
    )


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{time_text(abs(seconds))}"
