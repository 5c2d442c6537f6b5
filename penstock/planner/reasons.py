"""Why a plan is the best of those that were predicted, and why each of the others is not."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from penstock.trace.rank_times import mean_times, rank_times
from penstock.trace.units import bytes_text, count_text, number_text, percent_text, time_text

from .candidates import Candidate
from .plan import Plan
from .stage_rows import segments_of, stages_text

HEADS = (
    *("stages", "replicas", "micro-batches", "schedule", "recomputed", "step", "samples/s"),
    *("memory", "why it is not the best"),
)
_WORDS: Mapping[str, str] = {
    "work": "work for each device",
    "recompute_s": "recompute",
    "communication_s": "messages",
    "bubble_s": "bubble",
    "imbalance_s": "unequal stages",
    "reduction_s": "sums over replicas",
    "optimizer_s": "the optimizer",
}
_WORTH_SAYING = 1e-3
"""The share of a step from which the optimizer is named."""
_WORTH_A_WORD = 0.005
_LITTLE = "a little of everything"
_WORK = ("forward_s", "backward_s", "weight_s")


def candidate_rows(candidates: Sequence[Candidate]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each candidate, the best first."""
    best = candidates[0]
    why_slower = slower_than(best)
    for candidate in candidates:
        plan = candidate.plan
        assert plan.batch_size is not None
        yield (
            candidate.stages_text,
            str(plan.placement.num_replicas),
            str(plan.num_microbatches),
            plan.schedule.name,
            candidate.recompute_text,
            _step_text(candidate),
            number_text(plan.batch_size / candidate.step_s),
            bytes_text(candidate.peak_bytes),
            "" if candidate is best else why_slower(candidate),
        )


def _step_text(candidate: Candidate) -> str:
    return "at least " * candidate.is_bound + time_text(candidate.step_s)


def slower_than(best: Candidate) -> Callable[[Candidate], str]:
    """Return what says of a candidate on what it spends more or less, as shares of the best one's
    step: all that is worth a line, so that they add up to the difference.
    """
    kinds_of_best = cache(lambda: _kinds(best))  # not needed beside bounds alone

    def why(candidate: Candidate) -> str:
        slower = candidate.step_s / best.step_s - 1
        if candidate.is_bound:
            return f"at least {_than(slower)}"
        own, others = _kinds(candidate), kinds_of_best()
        more = {_WORDS[name]: (own[name] - others[name]) / best.step_s for name in own}
        named = {name: share for name, share in more.items() if abs(share) >= _WORTH_A_WORD}
        rest = sum(more.values()) - sum(named.values())
        if abs(rest) >= _WORTH_A_WORD:
            named["all else"] = rest
        most = sorted(named.items(), key=lambda item: -abs(item[1]))
        devices = count_text(candidate.num_devices, "device")
        return (
            f"{_than(slower)}: "
            + (", ".join(f"{name} {share:+.1%}" for name, share in most) or _LITTLE)
            + (f"; that is not certain, and it needs {devices}" if slower < 0 else "")
        )

    return why


def _than(slower: float) -> str:
    if percent_text(abs(slower)) == percent_text(0):
        return "as fast"
    return f"{percent_text(abs(slower))} {'slower' if slower > 0 else 'faster'}"


def _kinds(candidate: Candidate) -> dict[str, float]:
    """Return the mean seconds of a rank by kind; forward and backward are one."""
    means = mean_times(rank_times(candidate.timeline))
    kinds = {name: seconds for name, seconds in means.items() if name in _WORDS}
    kinds["work"] = sum(means[name] for name in _WORK)
    kinds["optimizer_s"] += candidate.update_s
    return kinds


def why_best(
    candidates: Sequence[Candidate], num_looked_at: int, cluster_name: str
) -> Iterator[str]:
    """Yield lines on the first candidate: its step, its limit, who decides otherwise."""
    best = candidates[0]
    plan = best.plan
    is_least = best.step_s <= min(other.step_s for other in candidates)
    yield (
        f"predicted: a step of {time_text(best.step_s)} on {cluster_name}, "
        f"{'the least' if is_least else 'as good as the least, on fewer devices,'} of "
        f"{count_text(num_looked_at, 'plan')}"
    )
    if idle := plan.placement.idle:
        yield f"devices {', '.join(map(str, idle))} stay unused: with them a step takes no less"
    if plan.num_stages == 1 and plan.predicted_stages is None:
        yield "the model is not cut: no cut was predicted to be faster"
    elif plan.num_stages > 1:
        yield _limit_text(plan, best)
    if best.update_s > _WORTH_SAYING * best.step_s:
        yield f"the optimizer takes {time_text(best.update_s)} of a step, where it takes longest"
    yield from _otherwise(candidates)
    if plan.predicted_stages is not None:
        yield (
            "each device's bytes: weights with gradients and optimizer state, activations at "
            "most; to the next stage: of a micro-batch, and as much comes back"
        )


def _otherwise(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield a line for each candidate that is the fastest of those that decide otherwise."""
    best = candidates[0]
    why_slower, otherwise = slower_than(best), dict[int, list[str]]()
    for name, decided in best.decisions.items():
        others = [n for n, own in enumerate(candidates) if own.decisions[name] != decided]
        if others:
            fastest = min(others, key=lambda n: candidates[n].step_s)
            otherwise.setdefault(fastest, []).append(name)
    for n, names in otherwise.items():
        other = candidates[n]
        step = f"{_step_text(other)} ({other.step_s / best.step_s - 1:+.1%})"
        why = "" if other.is_bound else f"; {why_slower(other)}"
        yield f"with other {', '.join(names)}: {step}: {other}{why}"


def _limit_text(plan: Plan, best: Candidate) -> str:
    """Say which stage is slowest, and what that costs."""
    assert plan.predicted_s is not None
    seconds = {own: sum(plan.predicted_s[n] for n in own) for own in segments_of(plan)}
    slowest = max(seconds, key=seconds.__getitem__)
    handover_s = max((own.handover_s for own in plan.predicted_stages or ()), default=0.0)
    return (
        f"limited by stage {stages_text(slowest)}, {time_text(seconds[slowest])} a micro-batch; "
        f"bubble {percent_text(best.timeline.bubble)}"
        + (f", slowest handover {time_text(handover_s)}" if handover_s else "")
    )


def unsplit_text(candidates: Sequence[Candidate], unsplit: Candidate | None, why: str) -> str:
    """Say how the unsplit model does beside the best candidate, or `why` it is not there."""
    if unsplit is None:
        return f"the unsplit model {why}"
    return f"unsplit: {unsplit}, {slower_than(candidates[0])(unsplit)}"
