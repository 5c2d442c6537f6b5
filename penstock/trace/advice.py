"""Advice on a step, made from its figures: what costs most time, and what to change."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from .breakdown import RankTimes, mean_times, rank_times, share
from .timeline import MemoryKind, Timeline
from .units import bytes_text, count_text, percent_text

_SLOW = 1.15
"""Work of a rank, as a multiple of the mean, from which on moving layers pays."""
_LARGE = 0.1
"""Share of the step from which on a kind of time is worth a change."""
_LARGE_BUBBLE = 0.2
_MANY = 8
"""Micro-batches for each rank beyond which more of them change little."""
_FREE = 0.5
"""Share of the memory limit up to which keeping more is safe advice."""


class Advice(NamedTuple):
    """A sentence, and the share of the step that it could save at most."""

    cost: float
    text: str


def advice(
    timeline: Timeline,
    *,
    optimizer_s: float = 0.0,
    set_up_s: float = 0.0,
    limits_bytes: tuple[int, ...] = (),
) -> tuple[Advice, ...]:
    """Return advice on a step, the most costly problem first; empty if nothing stands out.

    `limits_bytes` are the limits of the memory that the timeline has, by rank.
    """
    if not timeline.step_s:
        return ()
    rest = {"optimizer_s": optimizer_s, "set_up_s": set_up_s}
    ranks = tuple(rank.with_rest(**rest) for rank in rank_times(timeline))
    whole_s = float(timeline.step_s) + optimizer_s + set_up_s
    shares = {kind: float(value_s) / whole_s for kind, value_s in mean_times(ranks).items()}
    found = [*_unequal(timeline, ranks, whole_s), *_idle(timeline, shares)]
    found += _recomputed(timeline, shares, limits_bytes)
    found += _outside(shares)
    return tuple(sorted(found, key=lambda one: -one.cost))


def _unequal(timeline: Timeline, ranks: tuple[RankTimes, ...], whole_s: float) -> Iterator[Advice]:
    """Advise to move layers away from a rank that works longer than the mean."""
    works_s = [
        float(rank.forward_s + rank.recompute_s + rank.backward_s + rank.weight_s)
        for rank in ranks
    ]
    mean_s = sum(works_s) / len(works_s)
    slowest = max(range(len(works_s)), key=works_s.__getitem__)
    ratio = share(works_s[slowest], mean_s)
    if ratio < _SLOW:
        return
    stages: dict[int, set[int]] = defaultdict(set)
    for span in timeline.spans:
        stages[span.rank].add(span.instruction.stage)
    own = stages[slowest]
    who = f"stage {min(own)}" if len(own) == 1 else f"rank {slowest}"
    text = f"{who.capitalize()} takes {ratio:.2f} times the mean: move a layer to another stage."
    yield Advice((works_s[slowest] - mean_s) / whole_s, text)


def _idle(timeline: Timeline, shares: dict[str, float]) -> Iterator[Advice]:
    """Advise on a large bubble, on messages, and on sums over replicas."""
    bubble, messages, sums = (
        shares[kind] for kind in ("bubble_s", "communication_s", "reduction_s")
    )
    count = timeline.schedule.num_microbatches
    if bubble >= _LARGE_BUBBLE and count < _MANY * timeline.num_ranks:
        now = count_text(count, "micro-batch")
        text = f"The bubble is {percent_text(bubble)} of the step with {now}: use more of them."
        yield Advice(bubble, text)
    if messages >= _LARGE:
        text = (
            f"Messages between stages take {percent_text(messages)} of the step: use fewer "
            "stages, cut where less is sent, or use the schedule eager_1f1b."
        )
        yield Advice(messages, text)
    if sums >= _LARGE:
        text = (
            f"Summing gradients over replicas takes {percent_text(sums)} of the step: use a "
            "larger batch, or fewer replicas."
        )
        yield Advice(sums, text)


def _recomputed(
    timeline: Timeline, shares: dict[str, float], limits_bytes: tuple[int, ...]
) -> Iterator[Advice]:
    """Advise to recompute less, if memory is free or its limit is unknown."""
    recompute = shares["recompute_s"]
    if recompute < _LARGE:
        return
    start = f"Recomputes take {percent_text(recompute)} of the step"
    peaks = timeline.peak_bytes_by_kind().get(MemoryKind.ACTIVATIONS, ())
    if not limits_bytes or not any(peaks):
        yield Advice(recompute, f'{start}: if memory allows, set recompute = "never".')
        return
    fullest = max(zip(peaks, limits_bytes, strict=False), key=lambda pair: pair[0] / pair[1])
    if fullest[0] <= _FREE * fullest[1]:
        of = f"{bytes_text(fullest[0])} of {bytes_text(fullest[1])}"
        yield Advice(recompute, f'{start}, and memory is free ({of}): set recompute = "never".')


def _outside(shares: dict[str, float]) -> Iterator[Advice]:
    """Advise on an optimizer or a set-up that takes much of a step."""
    if shares["optimizer_s"] >= _LARGE:
        text = (
            f"The optimizer takes {percent_text(shares['optimizer_s'])} of the step: use a larger "
            "batch."
        )
        yield Advice(shares["optimizer_s"], text)
    if shares["set_up_s"] >= _LARGE:
        text = (
            f"Set-up takes {percent_text(shares['set_up_s'])} of the step: use fewer, larger "
            "micro-batches."
        )
        yield Advice(shares["set_up_s"], text)
