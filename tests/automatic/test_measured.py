"""What a layer was measured to take counts in the place of what is estimated, whole or divided."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.automatic.parallelize import plan_for
from penstock.automatic.target import Target
from penstock.errors import ConfigError
from penstock.planner.candidates import Constraints
from penstock.planner.make_plan import plan_profile
from penstock.planner.mesh_costs import MeshPrices
from penstock.planner.mesh_task import MeshTask
from penstock.planner.plan import Plan
from penstock.planner.plan_sharding import sharding_of
from penstock.planner.submeshes import MEMORY_POLICIES, Submesh
from penstock.sharding.costs import Costs
from penstock.sharding.program import whole_s as layer_s
from penstock.types import Transport
from penstock_recipes.zoo import gpt
from tests.few_devices import cluster
from tests.mesh_tasks import mesh_task, on_mesh, plan_on_meshes

BATCH, LENGTH, M = 16, 32, 4
SLOW = 4
"""The last of four blocks, after the embedding."""


@cache
def task_on(*hosts: int, far: float = 1e9) -> MeshTask:
    with torch.device("meta"):
        model = gpt(num_layers=4, width=128, num_heads=4, num_words=64, max_length=LENGTH)
        words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return replace(
        mesh_task(model, words, cluster(*hosts, far=far), M), policies=MEMORY_POLICIES[:1]
    )


def factors(slow: float, count: int) -> tuple[float, ...]:
    return tuple(slow if n == SLOW else 1.0 for n in range(count))


def planned(task: MeshTask, of_layers: Sequence[float]) -> Plan:
    return plan_on_meshes(replace(task, factors_of=lambda number: tuple(of_layers)))


def stage_of_slow(plan: Plan) -> list[int]:
    ends = [sum(plan.partition[: n + 1]) for n in range(plan.num_stages)]
    return [plan.partition[n] for n, end in enumerate(ends) if end > SLOW][:1]


def test_a_layer_that_is_slower_than_estimated_gets_a_stage_of_fewer_layers() -> None:
    task = task_on(1, 1)
    usual, slow = plan_on_meshes(task), planned(task, factors(10, len(task.names)))
    assert slow.partition != usual.partition
    assert stage_of_slow(slow) < stage_of_slow(usual)
    assert slow.predicted_step_s is not None and usual.predicted_step_s is not None
    assert slow.predicted_step_s > usual.predicted_step_s


def test_factors_of_one_change_no_bit() -> None:
    task = task_on(2, 2)
    ones = planned(task, factors(1, len(task.names)))
    assert ones.layer_factors == factors(1, len(task.names))
    assert replace(ones, layer_factors=()) == plan_on_meshes(task)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_part_of_a_layer_takes_its_share_of_what_was_measured(num_devices: int) -> None:
    """Layers that do the same, of which one is slower, are told apart."""
    task, mesh = task_on(2), Submesh(0, 1, num_devices)
    given = task.graph_of(M), task.names, task.model.spans, task.cluster, M, "data"

    def seconds(slow: float, layer: int) -> float:
        own = MeshPrices(*given, factors=factors(slow, len(task.names)))
        return on_mesh(own, layer, layer + 1, mesh).seconds

    whole_s = layer_s(task.graph_of(M), SLOW, Costs((1,), task.cluster))
    one_s, two_s, three_s = (seconds(slow, SLOW) for slow in (1, 2, 3))
    assert three_s - two_s == pytest.approx(two_s - one_s, rel=5e-3)
    assert (two_s - one_s) * num_devices == pytest.approx(whole_s, rel=5e-3)
    assert seconds(3, SLOW - 1) == seconds(1, SLOW - 1) == one_s


def test_operators_are_divided_as_they_were_in_the_search() -> None:
    """Where links are slow, only what takes long enough is divided: also when a plan is run."""
    task = replace(task_on(2), shardings=("auto",))
    slow = replace(task, cluster=cluster(2, near=1e7), num_microbatches=1)
    graph, count = slow.graph_of(1), len(task.names)
    plans = [
        replace(planned(task, factors(1, count)), cluster=slow.cluster, layer_factors=own)
        for own in ((), (1e3,) * count)
    ]
    few, many = (
        sum(own.is_divided for own in sharding_of(plan, graph, task.names).layers)
        for plan in plans
    )
    assert few < many


INPUTS = torch.ones(8, 8)


class Sleeper(nn.Linear):
    """A layer of which no operator tells how long it takes."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.002)
        return super().forward(x)


def test_layers_are_measured_where_they_are() -> None:
    layers = [*(nn.Linear(8, 8) for _ in range(3)), Sleeper(8, 8, bias=False)]
    where = cluster(2, torch_type="cpu")
    made = plan_for(layers, INPUTS, where, num_microbatches=2, measure=True)
    assert made.predicted_s is not None and max(made.predicted_s) > 0.0008
    on_meshes = plan_for(
        layers, INPUTS, where, num_microbatches=2, measure=True, sharding="megatron"
    )
    _, one, same, sleeper = on_meshes.layer_factors
    assert 0 < one == same < sleeper


def renamed(name: str) -> penstock.Cluster:
    found = cluster(2, torch_type="cpu")
    return replace(found, devices={"core": replace(found.devices["core"], name=name)})


@pytest.mark.parametrize(
    ("place", "where", "measured"),
    [
        ("cpu", cluster(2, torch_type="cpu"), True),
        ("cpu", cluster(2, torch_type="cuda"), False),
        ("cpu", renamed("another core"), False),
        ("meta", cluster(2, torch_type="cpu"), False),
    ],
)
def test_layers_with_values_on_the_clusters_kind_of_device_are_measured_by_default(
    place: str, where: penstock.Cluster, measured: bool
) -> None:
    layers = [nn.Linear(8, 8, device=place), Sleeper(8, 8, device=place)]
    inputs = INPUTS.to(place)
    made = plan_for(layers, inputs, where, num_microbatches=2, measure="auto")
    counted = plan_for(layers, inputs, where, num_microbatches=2, measure=False)
    assert (made.predicted_s != counted.predicted_s) == measured


def test_layers_are_counted_by_default_where_memory_is_short(monkeypatch) -> None:
    def short(*args: Any, measure: bool = True, **options: Any) -> penstock.Profile:
        if measure:
            raise torch.OutOfMemoryError("all of it is taken")
        return penstock.profile(*args, measure=False, **options)

    monkeypatch.setattr("penstock.automatic.parallelize.profile", short)
    layers, where = [nn.Linear(8, 8), Sleeper(8, 8)], cluster(2, torch_type="cpu")
    assert plan_for(layers, INPUTS, where, measure="auto") == plan_for(layers, INPUTS, where)
    with pytest.raises(torch.OutOfMemoryError):
        plan_for(layers, INPUTS, where, measure=True)


def test_a_users_model_is_measured_where_it_is_or_not_at_all() -> None:
    layers, there = [nn.Linear(8, 8), nn.Linear(8, 8)], cluster(2, torch_type="cuda")
    with pytest.raises(ConfigError, match="model and inputs are on cpu; give both on cuda"):
        penstock.plan(layers, there, example_inputs=INPUTS, measure=True)
    assert {parameter.device.type for layer in layers for parameter in layer.parameters()} == {
        "cpu"
    }
    asked = penstock.Constraints(batch_size=len(INPUTS), num_microbatches=2)
    plan = penstock.plan(
        layers, cluster(1, torch_type="cpu"), example_inputs=INPUTS, constraints=asked
    )
    assert plan.predicted_step_s


def test_a_target_that_is_counted_commits_statistics_like_a_profile_of_its_layers() -> None:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)]
    inputs = torch.randn(8, 4)
    device = next(iter(cluster(2).devices.values()))
    counted = Target.of(layers, inputs).profile(device=device)
    alike = penstock.profile(layers, inputs, measure=False)
    norms = [own.num_norms for own in alike.weights]
    assert norms == [0, 1, 0] == [own.num_norms for own in counted.weights]


def test_all_processes_of_a_job_are_planned_to_get_one_batch() -> None:
    """Replicas would be faster, and each of them needs samples of its own."""
    with torch.device("meta"):
        layers, inputs = [nn.Linear(256, 256) for _ in range(2)], torch.zeros(512, 256)
    where = cluster(2, near=1e9, issue_s=1e-4)
    profile = penstock.profile(layers, inputs, measure=False, torch_type="cuda")
    asked = Constraints(batch_size=512, transport=Transport.TORCH_DISTRIBUTED)
    best = plan_profile(profile, where, 512, constraints=asked).plan
    assert best.placement.num_replicas == 2
    assert plan_for(layers, inputs, where).placement.num_replicas == 1
