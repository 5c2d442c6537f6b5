"""Why a plan is the best of those that were foretold, and why each of the others is not."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.costs.cluster import Cluster
from penstock.trace.rank_times import mean_times, rank_times
from penstock.trace.table import columns
from penstock.trace.units import bytes_text, percent_text, time_text

from .choose import Choices, Found
from .foretell import Foretold

HEADS = (
    *("stages", "replicas", "micro-batches", "schedule", "recomputed", "step", "samples/s"),
    *("memory", "why it is not the best"),
)
_WORDS: Mapping[str, str] = {
    "work": "more work for each device",
    "recompute_s": "recompute",
    "communication_s": "messages",
    "bubble_s": "bubble",
    "imbalance_s": "unequal stages",
    "reduction_s": "sums over replicas",
    "optimizer_s": "the optimizer",
}
_WORK = ("forward_s", "backward_s", "weight_s")


def choices_text(choices: Choices) -> str:
    """Return the best candidates as a table, and the model uncut with them."""
    return "\n".join(columns([HEADS, *choice_rows(choices)], num_left=len(HEADS))) + "\n"


def choice_rows(choices: Choices) -> Iterator[tuple[str, ...]]:
    """Yield a row for each of the best, and for the model uncut if that is not among them."""
    best = choices.best[0]
    why_slower = slower_than(best)
    uncut = [] if choices.uncut is None or choices.uncut in choices.best else [choices.uncut]
    for found in (*choices.best, *uncut):
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
            f"{plan.batch_size / found.step_s:,.4g}",
            bytes_text(max(found.foretold.timeline.peak_bytes_of_ranks())),
            "" if found is best else why_slower(found),
        )


def slower_than(best: Found) -> Callable[[Found], str]:
    """Return what says of a candidate on what it spends more, as shares of the best one's step."""
    others = _kinds(best.foretold)

    def why(found: Found) -> str:
        own = _kinds(found.foretold)
        more = {name: (own[name] - others[name]) / best.step_s for name in own}
        most = sorted(more.items(), key=lambda item: -item[1])[:2]
        named = [f"{_WORDS[name]} +{percent_text(share)}" for name, share in most if share > 0.005]
        slower = found.step_s / best.step_s - 1
        return f"{percent_text(slower)} slower: {', '.join(named) or 'a little of everything'}"

    return why


def why_best(choices: Choices, cluster: Cluster) -> tuple[str, ...]:
    """Return lines that say why the first of the choices was chosen."""
    best = choices.best[0]
    why_slower = slower_than(best)
    lines = [
        f"foretold: a step of {time_text(best.step_s)} on {cluster.name}, the least of "
        f"{choices.num_looked_at} plans",
        *_range(best, cluster),
        *(f"next: {_name(other)}, {why_slower(other)}" for other in choices.best[1:2]),
    ]
    uncut = choices.uncut
    if uncut is None:
        cause = "fits no device" if choices.allows_uncut else "is not what was asked for"
        lines.append(f"the model uncut {cause}")
    elif uncut is best:
        lines.append("the model is not cut: no cut was foretold to be faster")
    else:
        lines.append(f"uncut: {_name(uncut)}, {why_slower(uncut)}")
    return tuple(lines)


def _name(found: Found) -> str:
    size = found.size
    stages = f"{size.num_stages} stage{'s' if size.num_stages > 1 else ''}"
    threads = found.plan.threads_per_stage
    return (
        f"{stages} x {size.num_replicas} replica{'s' if size.num_replicas > 1 else ''}"
        + (f" of {threads} threads" if threads > 1 else "")
        + f", {size.num_microbatches} micro-batches"
    )


def _range(found: Found, cluster: Cluster) -> Iterator[str]:
    """Say between what the step may be where figures of the cluster are intervals."""
    if not cluster.has_intervals:
        return
    steps_s = sorted(
        Foretold(found.plan, found.foretold.profile, end, found.plan.batch_size).quick_step_s
        for end in cluster.ends()
    )
    yield (
        f"between {time_text(steps_s[0])} and {time_text(steps_s[1])}, as figures of the cluster "
        "are known"
    )


def _kinds(foretold: Foretold) -> dict[str, float]:
    """Return the mean seconds of a rank by kind; forward and backward are one."""
    found = mean_times(rank_times(foretold.timeline))
    kinds = {name: seconds for name, seconds in found.items() if name in _WORDS}
    kinds["work"] = sum(found[name] for name in _WORK)
    kinds["optimizer_s"] += _mean(foretold.optimizer_s)
    return kinds


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
