"""What a search does not simulate would not have been faster: all of it, simulated, says so."""

from dataclasses import replace

import pytest
import torch

from penstock import Cluster
from penstock.planner import mesh_candidates
from penstock.planner.make_plan import choose_on_meshes
from penstock.planner.mesh_candidates import OnMeshes
from penstock.planner.mesh_plans import find_on_meshes
from penstock.planner.mesh_task import MeshTask
from penstock.planner.plan_sharding import sharding_of
from penstock.planner.submeshes import MEMORY_POLICIES, MemoryPolicy
from penstock.schedules import eager_1f1b, gpipe, one_f_one_b, zb_h1
from penstock_recipes.zoo import gpt
from tests.few_devices import cluster
from tests.mesh_tasks import mesh_task
from tests.ways import one_each

CLUSTERS = {
    "fast within hosts": cluster(2, 2),
    "unlike hosts": cluster(1, 3),
    "little memory": cluster(2, 2, memory_bytes=10_000_000),
    "slow links": cluster(1, 1, 1, far=1e9),
}


def task_on(where: Cluster, num_microbatches: int) -> MeshTask:
    with torch.device("meta"):
        model = gpt(num_layers=4, width=128, num_heads=4, num_words=64, max_length=32)
        words = torch.zeros(16, 32, dtype=torch.long)
    families = (one_f_one_b, eager_1f1b, gpipe, zb_h1())  # one whose backwards are divided, too
    return replace(mesh_task(model, words, where, num_microbatches), families=families)


@pytest.mark.parametrize(
    "policy", [policy for policy in MEMORY_POLICIES if policy.byte_s], ids=str
)
@pytest.mark.parametrize("memory_bytes", [5_000_000, 1 << 30])
def test_layers_are_divided_within_the_memory_that_a_plan_was_made_for(
    memory_bytes: int, policy: MemoryPolicy
) -> None:
    """Stages keep what their schedule has in flight there, not all micro-batches."""
    task = task_on(cluster(2, 2, memory_bytes=memory_bytes), 16)
    task = replace(task, policies=(policy,), families=(one_f_one_b,), shardings=("auto",))
    plan = choose_on_meshes(task).plan
    assert plan.sharding is not None
    found = sharding_of(plan, task.graph_of(16), task.names)
    assert len(found.layers) == len(task.names)


def what(own: OnMeshes) -> tuple[object, ...]:
    return own.answer.stages, own.family, own.prices.plan, own.prices.policies


@pytest.mark.parametrize(
    ("where", "num_microbatches"),
    one_each(CLUSTERS, (2, 16, 1)),
)
def test_what_is_not_simulated_would_not_be_faster(
    where: str, num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_on(CLUSTERS[where], num_microbatches)
    few, _ = find_on_meshes(task)
    monkeypatch.setattr(mesh_candidates, "least_step_s", lambda loads, number: 0.0)
    every, _ = find_on_meshes(task)
    seconds = {what(own): own.step_s for own in every if not own.is_bound}
    assert few[0].step_s == every[0].step_s == min(seconds.values())
    bounds = [own for own in few if own.is_bound]
    assert len(few) - len(bounds) < len(seconds)
    above = [own for own in bounds if own.step_s > seconds.get(what(own), own.step_s) * (1 + 1e-9)]
    assert above == []
