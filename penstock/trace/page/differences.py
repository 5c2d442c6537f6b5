"""How a measured step differs from what was foretold of it, with names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.schedules.ir import Compute, UpdateWeights
from penstock.trace.looks import PARTS, look_of
from penstock.trace.rank_times import KINDS, RankTimes, mean_times
from penstock.trace.timeline import Span, Timeline
from penstock.trace.units import time_text

from .page import Table


@dataclass(frozen=True, slots=True)
class Difference:
    """Seconds of one thing, foretold and measured."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def missed_s(self) -> float:
        """How much longer it took than foretold."""
        return self.measured_s - self.predicted_s


def differences(
    predicted: Timeline, measured: Timeline, times: Mapping[str, Sequence[RankTimes]]
) -> tuple[Difference, ...]:
    """Compare the step, the mean over ranks of each kind of time, and the instructions.

    `times` are those of "predicted" and "measured".  Of the instructions that run layers or move
    weights and are in both timelines, the one that was missed by most is named.
    """
    found = [Difference("step", predicted.step_s, measured.step_s)]
    foretold, seen = mean_times(times["predicted"]), mean_times(times["measured"])
    found += [
        Difference(f"{PARTS[kind].name}, mean of the ranks", foretold[kind], seen[kind])
        for kind in KINDS
        if foretold[kind] or seen[kind]
    ]
    return (*found, *_largest(predicted, measured))


def _largest(predicted: Timeline, measured: Timeline) -> tuple[Difference, ...]:
    """Return the instruction whose duration was missed by most, if the two have one in common."""
    foretold = {(span.rank, str(span.instruction)): span for span in _of_work(predicted)}
    pairs = [
        Difference(_name(span), foretold[key].duration_s, span.duration_s)
        for span in _of_work(measured)
        if (key := (span.rank, str(span.instruction))) in foretold
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
    """Write what was compared, and how much longer it took than foretold."""
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
