"""From what a model costs and a cluster to the plan whose step is predicted to be fastest.

profile ──┬─► each stage on one device            rank.py          ─┬─► the fastest
cluster ──┴─► stages on meshes of devices, whose  mesh_plans.py    ─┘
              operators these share; where the profile knows the operators

The reasons say why the fastest is the best of those that were predicted, and why each of the
others is not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import cast

from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.errors import ConfigError, PlanError
from penstock.trace.breakdown import mean_times, rank_times
from penstock.trace.timeline import Timeline
from penstock.trace.units import (
    bytes_text,
    columns,
    count_text,
    number_text,
    percent_text,
    time_text,
)

from .arguments import Model
from .candidates import Constraints
from .checks import check_costs
from .clustering import cluster_layers
from .mesh_candidates import OnMeshes
from .mesh_plans import find_on_meshes
from .mesh_task import FAMILIES, SHARDINGS, MeshTask
from .plan import Plan
from .rank import SAME, Candidates, OnRanks, find_plans

Candidate = OnRanks | OnMeshes
"""A plan that may be chosen: a device for each rank, or for each stage a mesh of devices."""
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
_MOST_ROWS = 12
"""Candidates of a table."""
_MANY_DEVICES = 16
"""Devices of a host above which a search of all its parts would take an hour."""


@dataclass(frozen=True)
class Choice:
    """The plan that was chosen, and all candidates: first its own, and then the fastest first.

    `unsplit_model` is None where that does not fit, or is not what was asked for.  `task` is that
    of stages on meshes, None where nobody knows the operators.
    """

    plan: Plan
    cluster: Cluster
    candidates: tuple[Candidate, ...]
    unsplit_model: Candidate | None = None
    task: MeshTask | None = None

    @property
    def timeline(self) -> Timeline:
        """The predicted step of the plan; on meshes with one rank for each."""
        return self.candidates[0].timeline

    @property
    def rows(self) -> Iterator[tuple[str, ...]]:
        """The heads of the table of candidates, and its rows: the best, and the unsplit model."""
        best: dict[tuple[str, ...], Candidate] = {}
        for own in self.candidates:  # of those that a row does not tell apart, the fastest
            plan, words = own.plan, (own.stages_text, own.recompute_text)
            numbers = plan.placement.num_replicas, plan.num_microbatches
            best.setdefault((*words, plan.schedule.name, *map(str, numbers)), own)
        rows, unsplit = [*best.values()][:_MOST_ROWS], self.unsplit_model
        beside = [] if unsplit is None or unsplit in rows else [unsplit]
        yield HEADS
        yield from candidate_rows([*rows, *beside])

    def __str__(self) -> str:
        table = "\n".join(columns([*self.rows], num_left=len(HEADS)))
        return f"{self.plan}\n{table}\n"


def choose_on_meshes(task: MeshTask) -> Choice:
    """Return the choice of stages on meshes alone.

    Raises:
        PlanError: nothing fits; says what is missing.
    """
    return _choice(task.cluster, None, task)


def plan_profile(  # noqa: PLR0913 - as `penstock.plan`
    profile: Profile | Sequence[Profile],
    cluster: Cluster,
    batch_size: int,
    *,
    constraints: Constraints | None = None,
    sharding: str | Sequence[str] | None = "auto",
    num_layers: int | None = None,
    num_best: int = 5,
    like: MeshTask | None = None,
    quick: bool = False,
) -> Choice:
    """Choose the plan whose step is predicted to be fastest; see `penstock.plan`.

    A `quick` search looks at fewer meshes and numbers of micro-batches.  `like` is the task of the
    same model and options on a cluster of more or fewer such hosts, to share its graphs and
    programs; only stages on meshes are candidates then.
    """
    is_list = isinstance(profile, list | tuple) and profile
    profiles: list[Profile] = [*cast(Sequence[Profile], profile if is_list else [profile])]
    for each in profiles:
        check_costs(each, cluster)
    asked = replace(constraints or Constraints(batch_size=batch_size), batch_size=batch_size)
    task = like and replace(like, cluster=_room(cluster, asked))
    task = task or mesh_task(profiles[0], cluster, asked, sharding, num_layers)
    on_devices: Candidates | None = None
    if like is None and (sharding is None or sharding == "auto" or not isinstance(sharding, str)):
        with suppress(*((ConfigError,) if task is not None else ())):
            on_devices = find_plans(profiles, cluster, asked, num_best=num_best)
    elif task is None:
        raise ConfigError(
            f"sharding={sharding!r} is how the devices of a stage share it, and nobody knows the "
            "operators of this model, or num_ranks, num_replicas or schedules rule that out; give "
            "the model instead of a profile from a file, or leave one of these out"
        )
    limit_s = on_devices.best[0].step_s / SAME if on_devices is not None else inf
    if task is not None:
        task = task.quick() if quick else task
        try:
            return _choice(cluster, on_devices, replace(task, limit_s=limit_s))
        except PlanError:
            if on_devices is None:
                raise
    return _choice(cluster, on_devices, None, missed=task is not None)


def _choice(
    cluster: Cluster, ranked: Candidates | None, task: MeshTask | None, *, missed: bool = False
) -> Choice:
    """Return the choice of the best of all candidates; `missed` if none on meshes is faster."""
    on_meshes, ended = ([], "") if task is None else find_on_meshes(task)
    on_ranks = [] if ranked is None else [*ranked.best]
    num_looked_at = len(on_meshes) + (0 if ranked is None else ranked.num_looked_at)
    candidates: list[Candidate] = [*on_meshes, *on_ranks]
    candidates[1:] = sorted(candidates[1:], key=lambda own: (own.step_s, own.is_bound))
    unsplit, beside = None, list[str]()
    if ranked is not None:
        unsplit = ranked.unsplit_model
        cause = "fits no device" if ranked.allows_unsplit_model else "is not what was asked for"
        if unsplit is not candidates[0]:
            beside.append(unsplit_text(candidates, unsplit, cause))
    beside += ["no stages on several devices are faster"] * missed + [ended] * bool(ended)
    plan, why = candidates[0].plan, why_best(candidates, num_looked_at, cluster.name)
    plan = replace(plan, why=(*why, *beside))
    if on_meshes:
        plan = replace(plan, cluster=cluster)  # of which the task knows a share of the memory
    else:
        peaks = candidates[0].timeline.peak_bytes_of_ranks()
        plan = replace(plan, predicted_peak_bytes=tuple(peaks))
    return Choice(plan, cluster, tuple(candidates), unsplit, task)


def mesh_task(
    profile: Profile,
    cluster: Cluster,
    asked: Constraints,
    sharding: str | Sequence[str] | None,
    num_layers: int | None = None,
) -> MeshTask | None:
    """Return the task of planning stages on meshes; None where it cannot be, or has no meaning."""
    operators, names = profile.operators, asked.schedules
    families = [family for family in FAMILIES if names is None or family.name in names]
    one_device = asked.num_ranks is not None or (asked.num_replicas or 1) > 1
    if operators is None or sharding is None or one_device or not families:
        return None
    named = (sharding,) if isinstance(sharding, str) else sharding
    task = replace(
        MeshTask.of(profile, cluster, asked.batch_size, asked.num_microbatches),
        cluster=_room(cluster, asked),
        families=families,
        shardings=SHARDINGS if sharding == "auto" else named,
    )
    spans = cluster_layers(task.graph_of(task.numbers[0]), profile.spans, cluster, num_layers)
    task = replace(task, model=Model(profile.layers, tuple(spans)))
    if max(len(host.devices) for host in cluster.hosts) <= _MANY_DEVICES:
        return task
    return task.quick(sum(host.count for host in cluster.hosts))


def _room(cluster: Cluster, asked: Constraints) -> Cluster:
    """Return a cluster with the share of each device's memory that may be used."""
    room = {
        name: replace(device, memory_bytes=int(asked.memory_share * device.memory_bytes))
        for name, device in cluster.devices.items()
    }
    return replace(cluster, devices=room)


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
    seconds = plan.predicted_s
    slowest = max(range(plan.num_stages), key=seconds.__getitem__)
    handover_s = max((own.handover_s for own in plan.predicted_stages or ()), default=0.0)
    return (
        f"limited by stage {slowest}, {time_text(seconds[slowest])} a micro-batch; "
        f"bubble {percent_text(best.timeline.bubble)}"
        + (f", slowest handover {time_text(handover_s)}" if handover_s else "")
    )


def unsplit_text(candidates: Sequence[Candidate], unsplit: Candidate | None, why: str) -> str:
    """Say how the unsplit model does beside the best candidate, or `why` it is not there."""
    if unsplit is None:
        return f"the unsplit model {why}"
    return f"unsplit: {unsplit}, {slower_than(candidates[0])(unsplit)}"
