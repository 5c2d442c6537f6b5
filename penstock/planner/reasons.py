"""Why a plan is the best of those that were predicted, and why each of the others is not."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.costs.cluster import Cluster
from penstock.trace.rank_times import mean_times, rank_times
from penstock.trace.units import (
    bytes_text,
    columns,
    count_text,
    number_text,
    percent_text,
    time_text,
)

from .mesh_candidates import Candidate
from .plan import Plan
from .predict import Prediction
from .rank import Candidates, Found
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


def choices_text(choices: Candidates) -> str:
    """Return the best candidates as a table, and the unsplit model with them."""
    return "\n".join(columns([HEADS, *choice_rows(choices)], num_left=len(HEADS))) + "\n"


def choice_rows(choices: Candidates) -> Iterator[tuple[str, ...]]:
    """Yield a row for each of the best, and for the unsplit model if that is not among them."""
    best = choices.best[0]
    why_slower = slower_than(best)
    own = choices.unsplit_model
    unsplit = [] if own is None or own in choices.best else [own]
    for found in (*choices.best, *unsplit):
        plan = found.plan
        assert plan.batch_size is not None
        per_rank = plan.schedule.stages_per_rank
        threads = f", {plan.threads_per_stage} threads" if plan.threads_per_stage > 1 else ""
        yield (
            f"{plan.num_stages}"
            + (f" on {found.size.num_ranks}" if per_rank > 1 else "")
            + threads,
            str(plan.placement.num_replicas),
            str(plan.num_microbatches),
            plan.schedule.name,
            f"{len(plan.recomputing)} of {plan.num_stages}",
            time_text(found.step_s),
            number_text(plan.batch_size / found.step_s),
            bytes_text(max(found.predicted.timeline.peak_bytes_of_ranks())),
            "" if found is best else why_slower(found),
        )


def slower_than(best: Found) -> Callable[[Found], str]:
    """Return what says of a candidate on what it spends more or less, as shares of the best one's
    step: all that is worth a line, so that they add up to the difference.
    """
    others = _kinds(best.predicted)

    def why(found: Found) -> str:
        own = _kinds(found.predicted)
        more = {_WORDS[name]: (own[name] - others[name]) / best.step_s for name in own}
        named = {name: share for name, share in more.items() if abs(share) >= _WORTH_A_WORD}
        rest = sum(more.values()) - sum(named.values())
        if abs(rest) >= _WORTH_A_WORD:
            named["all else"] = rest
        most = sorted(named.items(), key=lambda item: -abs(item[1]))
        slower = found.step_s / best.step_s - 1
        return (
            f"{_than(slower)}: "
            + (", ".join(f"{name} {share:+.1%}" for name, share in most) or _LITTLE)
            + (f"; that is not certain, and it needs {_devices(found)}" if slower < 0 else "")
        )

    return why


def _than(slower: float) -> str:
    if percent_text(abs(slower)) == percent_text(0):
        return "as fast"
    return f"{percent_text(abs(slower))} {'slower' if slower > 0 else 'faster'}"


def why_best(choices: Candidates, cluster: Cluster) -> tuple[str, ...]:
    """Return lines that say why the first of the choices was chosen."""
    best = choices.best[0]
    why_slower = slower_than(best)
    lines = [
        f"predicted: a step of {time_text(best.step_s)} on {cluster.name}, {_least(choices)} of "
        f"{count_text(choices.num_looked_at, 'plan')}",
        *(f"next: {_name(other)}, {why_slower(other)}" for other in choices.best[1:2]),
    ]
    unsplit = choices.unsplit_model
    if unsplit is None:
        cause = "fits no device" if choices.allows_unsplit_model else "is not what was asked for"
        lines.append(f"the unsplit model {cause}")
    elif unsplit is best:
        lines.append("the model is not cut: no cut was predicted to be faster")
    else:
        lines.append(f"unsplit: {_name(unsplit)}, {why_slower(unsplit)}")
    return tuple(lines)


def _name(found: Found) -> str:
    size, threads = found.size, found.plan.threads_per_stage
    return (
        f"{count_text(size.num_stages, 'stage')} x {count_text(size.num_replicas, 'replica')}"
        + (f" of {threads} threads" if threads > 1 else "")
        + f", {count_text(size.num_microbatches, 'micro-batch')}"
    )


def _least(choices: Candidates) -> str:
    """Say that the first of the choices takes least, or about that on fewer devices."""
    is_least = choices.best[0].step_s <= min(found.step_s for found in choices.best)
    return "the least" if is_least else "as good as the least, on fewer devices,"


def _devices(found: Found) -> str:
    return count_text(found.num_devices, "device")


def _kinds(predicted: Prediction) -> dict[str, float]:
    """Return the mean seconds of a rank by kind; forward and backward are one."""
    found = mean_times(rank_times(predicted.timeline))
    kinds = {name: seconds for name, seconds in found.items() if name in _WORDS}
    kinds["work"] = sum(found[name] for name in _WORK)
    kinds["optimizer_s"] += predicted.update_s
    return kinds


_DECISIONS: dict[str, Callable[[Candidate], object]] = {
    "stages": lambda own: own.answer.stages,
    "micro-batches": lambda own: own.prices.num_microbatches,
    "schedule": lambda own: own.family,
    "sharding": lambda own: own.prices.plan,
    "recompute": lambda own: own.policy,
}
"""What tells candidates apart, in the order in which it is decided."""


def why_on_meshes(plan: Plan, found: Sequence[Candidate], bubble: float) -> Iterator[str]:
    """Yield lines for the plan of the first candidate: its step, what limits it, and for each
    decision the fastest that decides otherwise.
    """
    best = found[0]
    where = "" if plan.cluster is None else f" on {plan.cluster.name}"
    yield (
        f"a step is predicted to take {time_text(best.step_s)}{where}, the least of "
        f"{count_text(len(found), 'candidate')}"
    )
    if idle := plan.placement.idle:
        yield f"devices {', '.join(map(str, idle))} stay unused: with them a step takes no less"
    assert plan.predicted_s is not None and plan.predicted_stages is not None
    times = {own: sum(plan.predicted_s[n] for n in own) for own in segments_of(plan)}
    slowest = max(times, key=times.__getitem__)
    handover_s = max(own.handover_s for own in plan.predicted_stages)
    yield (
        f"limited by stage {stages_text(slowest)}, {time_text(times[slowest])} a micro-batch; "
        f"bubble {percent_text(bubble)}"
        + (f", slowest handover {time_text(handover_s)}" if handover_s else "")
    )
    if best.update_s > _WORTH_SAYING * best.step_s:
        yield f"the optimizer takes {time_text(best.update_s)} of a step, where it takes longest"
    for name, decided in _DECISIONS.items():
        others = (other for other in found if decided(other) != decided(best))
        for other in list(others)[:1]:  # they are sorted
            slower = other.step_s / best.step_s - 1
            yield f"with other {name}: {other.step_text} ({slower:+.1%}): {other}"
    yield (
        "each device's bytes: weights with gradients and optimizer state, activations at most; "
        "to the next stage: of a micro-batch, and as much comes back"
    )
