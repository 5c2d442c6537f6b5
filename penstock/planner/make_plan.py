"""From what a model costs and a cluster to the plan whose step is predicted to be fastest.

profile ──┬─► each stage on one device            rank.py          ─┬─► the fastest
cluster ──┴─► stages on meshes of devices, whose  mesh_plans.py    ─┘
              operators these share; where the profile knows the operators
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import cast

from penstock.costs.cluster import Cluster
from penstock.costs.counting.graph import Graph
from penstock.costs.profile import Profile
from penstock.errors import ConfigError, PlanError
from penstock.sharding.costs import Costs
from penstock.sharding.program import layers_s
from penstock.trace.page import Page
from penstock.trace.timeline import Timeline
from penstock.trace.units import time_text

from .arguments import Model
from .candidates import Constraints
from .checks import check_costs
from .clustering import cluster_layers
from .mesh_plans import FAMILIES, SHARDINGS, MeshChoice, MeshTask, choose_on_meshes
from .plan import Plan
from .pricing import Pricing
from .rank import SAME, Candidates, find_plans
from .reasons import choices_text, why_best


@dataclass(frozen=True)
class Choice:
    """The plan that was chosen, and the candidates that it was compared with: those whose stages
    are on one device each, and those on meshes of devices; None where none of a kind fits, or
    could be looked at.
    """

    plan: Plan
    cluster: Cluster
    on_devices: Candidates | None = None
    task: MeshTask | None = None
    on_meshes: MeshChoice | None = None

    @property
    def is_on_meshes(self) -> bool:
        """True if the stages of the plan have several devices each."""
        return self.on_meshes is not None and self.plan.predicted_stages is not None

    @property
    def timeline(self) -> Timeline:
        """The predicted step of the plan; with one rank for each mesh."""
        if self.is_on_meshes:
            assert self.on_meshes is not None
            return self.on_meshes.timeline
        assert self.on_devices is not None
        return self.on_devices.best[0].predicted.timeline

    def page(self) -> Page:
        """Return the plan and its candidates as a page."""
        from .plan_page import mesh_plan_page, plan_page

        if self.is_on_meshes:
            assert self.task is not None and self.on_meshes is not None
            return mesh_plan_page(self.task, self.on_meshes)
        assert self.on_devices is not None
        return plan_page(self.plan, self.on_devices, self.cluster)

    def __str__(self) -> str:
        """Return the plan, and the table of candidates on whole devices."""
        table = "" if self.on_devices is None else f"\n{choices_text(self.on_devices)}"
        return f"{self.plan}\n{table}"


def plan_profile(  # noqa: PLR0913 - as `penstock.plan`
    profile: Profile | Sequence[Profile],
    cluster: Cluster,
    batch_size: int,
    *,
    constraints: Constraints | None = None,
    sharding: str | Sequence[str] | None = "auto",
    num_layers: int | None = None,
    num_best: int = 5,
) -> Choice:
    """Choose the plan whose step is predicted to be fastest; see `penstock.plan`.

    Raises:
        PlanError, ConfigError: as `penstock.plan`.
    """
    is_list = isinstance(profile, list | tuple) and profile
    profiles: list[Profile] = [*cast(Sequence[Profile], profile if is_list else [profile])]
    for each in profiles:
        check_costs(each, cluster)
    asked = replace(constraints or Constraints(batch_size=batch_size), batch_size=batch_size)
    task = _task(profiles[0], cluster, asked, sharding, num_layers)
    on_devices: Candidates | None = None
    if sharding is None or sharding == "auto" or not isinstance(sharding, str):
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
            on_meshes = choose_on_meshes(replace(task, limit_s=limit_s))
        except PlanError:
            if on_devices is None:
                raise
        else:
            return _of_meshes(cluster, on_devices, task, on_meshes)
    assert on_devices is not None, "or an error was raised"
    best = on_devices.best[0]
    beside = ("no stages on several devices are faster",) if task is not None else ()
    chosen = replace(
        best.plan,
        why=(*why_best(on_devices, cluster), *beside),
        predicted_peak_bytes=tuple(best.predicted.timeline.peak_bytes_of_ranks()),
    )
    return Choice(chosen, cluster, on_devices)


def _of_meshes(
    cluster: Cluster, on_devices: Candidates | None, task: MeshTask, on_meshes: MeshChoice
) -> Choice:
    """Return the choice of a plan on meshes, which knows the whole cluster."""
    chosen = replace(on_meshes.plan, cluster=cluster)
    if on_devices is not None:
        assert chosen.predicted_step_s is not None
        best_s = on_devices.best[0].step_s
        slower = best_s / chosen.predicted_step_s - 1
        line = f"with each stage on one device: {time_text(best_s)} ({slower:+.1%})"
        chosen = replace(chosen, why=(*chosen.why, line))
    return Choice(chosen, cluster, on_devices, task, replace(on_meshes, plan=chosen))


def _task(
    profile: Profile,
    cluster: Cluster,
    asked: Constraints,
    sharding: str | Sequence[str] | None,
    num_layers: int | None,
) -> MeshTask | None:
    """Return the task of planning stages on meshes; None where nobody knows the operators, or
    what was asked for has no meaning there.
    """
    operators, names = profile.operators, asked.schedules
    families = [family for family in FAMILIES if names is None or family.name in names]
    one_device = asked.num_ranks is not None or (asked.num_replicas or 1) > 1
    if operators is None or sharding is None or one_device or not families:
        return None
    room = {
        name: replace(device, memory_bytes=int(asked.memory_share * device.memory_bytes))
        for name, device in cluster.devices.items()
    }
    within = replace(cluster, devices=room)

    @cache
    def graph_of(num_microbatches: int) -> Graph:
        graph: Graph = operators.graph_of(-(-asked.batch_size // num_microbatches))
        return graph

    @cache
    def factors_of(num_microbatches: int) -> tuple[float, ...]:
        """Return the seconds of each layer in the profile, by those of the roofline."""
        graph, kind = graph_of(num_microbatches), cluster.places[0].kind
        size = -(-asked.batch_size // num_microbatches)
        known = Pricing(profile, cluster).seconds(kind, size, num_microbatches)
        roofline_s = layers_s(graph, len(operators.names), Costs((1,), cluster))
        return tuple(
            (own.forward_s + own.backward_s) / s or 1.0 if s else 1.0
            for own, s in zip(known, roofline_s, strict=True)
        )

    task = MeshTask(
        model=Model(profile.layers, profile.spans),
        names=operators.names,
        graph_of=graph_of,
        cluster=within,
        batch_size=asked.batch_size,
        num_microbatches=asked.num_microbatches,
        families=families,
        shardings=_ready_plans(sharding),
        factors_of=factors_of,
    )
    spans = cluster_layers(task.graph_of(task.numbers[0]), profile.spans, cluster, num_layers)
    return replace(task, model=Model(profile.layers, tuple(spans)))


def _ready_plans(sharding: str | Sequence[str]) -> Sequence[str]:
    if isinstance(sharding, str):
        return SHARDINGS if sharding == "auto" else (sharding,)
    return sharding


def save_prediction(path: Path, timeline: Timeline) -> None:
    """Write what was predicted for a plan beside its file.

    Raises:
        PlanError: the file cannot be written.
    """
    beside = prediction_path(path)
    try:
        beside.write_text(timeline.to_json(), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write {beside}: {error.strerror}") from None


def prediction_path(path: Path) -> Path:
    """Return the file beside a plan's that has its predicted timeline."""
    return path.with_suffix(".predicted.json")
