"""From what a model costs and a cluster to the plan whose step is predicted to be fastest.

profile ──┬─► each stage on one device            rank.py          ─┬─► the fastest
cluster ──┴─► stages on meshes of devices, whose  mesh_plans.py    ─┘
              operators these share; where the profile knows the operators
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import cast

from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.errors import ConfigError, PlanError
from penstock.trace.timeline import Timeline
from penstock.trace.units import columns

from .arguments import Model
from .candidates import Candidate, Constraints
from .checks import check_costs
from .clustering import cluster_layers
from .mesh_plans import find_on_meshes
from .mesh_task import FAMILIES, SHARDINGS, MeshTask
from .plan import Plan
from .rank import SAME, Candidates, find_plans
from .reasons import HEADS, candidate_rows, unsplit_text, why_best

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
) -> Choice:
    """Choose the plan whose step is predicted to be fastest; see `penstock.plan`.

    `like` is the task of the same model and options on a cluster of more or fewer such hosts, to
    share its graphs and programs; only stages on meshes are candidates then.
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


def save_prediction(path: Path, timeline: Timeline) -> None:
    """Write what was predicted for a plan beside its file; a PlanError if it cannot be written."""
    beside = prediction_path(path)
    try:
        beside.write_text(timeline.to_json(), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write {beside}: {error.strerror}") from None


def prediction_path(path: Path) -> Path:
    """Return the file beside a plan's that has its predicted timeline."""
    return path.with_suffix(".predicted.json")
