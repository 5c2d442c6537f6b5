"""Stages that recompute layers one by one: what they cost and keep, and which stages do it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
import torch

import penstock
from benchmarks.alpa_paper.subjects import RESNET, subjects
from penstock.errors import PlanError
from penstock.planner.make_plan import Choice, choose_on_meshes
from penstock.planner.mesh_costs import MeshPrices
from penstock.planner.mesh_plans import find_on_meshes
from penstock.planner.mesh_task import MeshTask
from penstock.planner.plan import Plan
from penstock.planner.plan_page import layers_figure
from penstock.planner.plan_sharding import sharding_of
from penstock.planner.submeshes import MEMORY_POLICIES, MemoryPolicy, Submesh
from penstock.schedules import Sizes
from penstock.schedules.memory import peak_bytes
from penstock.schedules.passes import add_recompute
from penstock.sharding.layouts import S
from penstock.types import Recompute, RecomputeLayers
from penstock_recipes.zoo import gpt
from tests.automatic.test_page import layers_of
from tests.few_devices import cluster
from tests.mesh_tasks import mesh_task, on_mesh, plan_on_meshes

BATCH, LENGTH, WIDTH, M = 16, 32, 128, 4
NEVER, WHOLE, LAYERS = map(MemoryPolicy, (Recompute.NEVER, Recompute.STAGE, Recompute.LAYERS))
CROSSES = BATCH // M * LENGTH * WIDTH * 4
"""Bytes of a micro-batch between two blocks."""
ENTERS = BATCH // M * LENGTH * 8


@cache
def task_on(*hosts: int, num_layers: int = 4) -> MeshTask:
    with torch.device("meta"):
        model = gpt(
            num_layers=num_layers, width=WIDTH, num_heads=4, num_words=64, max_length=LENGTH
        )
        words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    task = mesh_task(model, words, cluster(*hosts), M)
    return replace(task, policies=[LAYERS])


@cache
def chosen(*hosts: int) -> Choice:
    return choose_on_meshes(task_on(*hosts))


def prices(task: MeshTask, *policies: MemoryPolicy) -> MeshPrices:
    """Return the costs by memory policies."""
    given = task.graph_of(M), task.names, task.model.spans, task.cluster, M
    return MeshPrices(*given, task.shardings[0], policies)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_stage_keeps_the_inputs_of_its_layers_and_the_graph_of_one(shards: int) -> None:
    task, submesh = task_on(4), Submesh(0, 1, shards)
    count = len(task.names)
    by_layers, whole = (prices(task, own) for own in (LAYERS, WHOLE))
    alone = [on_mesh(whole, n, n + 1, submesh) for n in range(count)]
    for start, end in combinations(range(count + 1), 2):
        own, other = (on_mesh(each, start, end, submesh) for each in (by_layers, whole))
        assert own.recompute is Recompute.LAYERS
        assert own.seconds == other.seconds == pytest.approx(2 * own.forward_s + own.backward_s)
        assert own.graph_bytes == max(each.graph_bytes for each in alone[start:end])
        assert own.stay_bytes == pytest.approx(own.state_bytes + own.graph_bytes)
        entering = len([n for n in range(start, end) if n]) * CROSSES / shards
        entering += 0 if start else ENTERS
        assert own.microbatch_bytes == pytest.approx(entering)
        assert own.kept.graph == round(entering + own.graph_bytes)


def test_a_plan_says_which_stages_recompute_what() -> None:
    choice = chosen(1, 2)
    plan = choice.plan
    assert Plan.from_json(plan.to_json()) == plan
    assert set(plan.recompute) == {Recompute.LAYERS} and plan.num_stages == 2
    assert [len(ranks[0]) for ranks in plan.placement.ranks] == [2, 1]
    _, *rows = plan.rows
    assert [row[0] for row in rows] == ["0", "1"] and {row[3] for row in rows} == {"layers"}
    figure = layers_figure(plan, layers_of(task_on(1, 2), choice))
    assert len(figure.layout["yaxis"]["ticktext"]) == 2
    assert len(figure.layout["annotations"]) == 1
    sharding = sharding_of(plan, task_on(1, 2).graph_of(M), task_on(1, 2).names)
    assert all({*own.leaving.values()} <= {(S(0),)} for own in sharding.layers[:3])
    assert any("limited by stage 0" in line for line in plan.why)
    assert f"recompute {plan.partition[0]}+{plan.partition[1]} layers" in str(choice.candidates[0])


def limited(memory_bytes: int, policies: Sequence[MemoryPolicy]) -> Plan:
    """Return the plan of stages on one device each, of so much memory."""
    where = cluster(1, 1, 1, 1, far=1e10, memory_bytes=memory_bytes)
    task = replace(task_on(1, num_layers=24), cluster=where, policies=policies)
    return plan_on_meshes(replace(task, num_microbatches=BATCH))


def test_each_stage_recomputes_as_few_layers_as_fit() -> None:
    """The first stages have more micro-batches in flight than the last ones."""
    found, whole = limited(24_000_000, MEMORY_POLICIES), limited(24_000_000, [NEVER, WHOLE])
    count = [len(own.layers) if isinstance(own, RecomputeLayers) else 0 for own in found.recompute]
    assert count == sorted(count, reverse=True) and count[0] > count[-1] == 0
    assert found.predicted_step_s is not None and whole.predicted_step_s is not None
    assert found.predicted_step_s < 0.95 * whole.predicted_step_s
    assert Recompute.STAGE in whole.recompute and Recompute.NEVER in whole.recompute
    with pytest.raises(PlanError, match="those that need least lack"):
        limited(24_000_000, [NEVER])
    state = max(own.state_bytes for own in found.predicted_stages or ())
    kept = [own.state_bytes + own.kept_bytes for own in found.predicted_stages or ()]
    assert state < max(kept) <= 24_000_000
    assert limited(32_000_000, MEMORY_POLICIES).recompute == (Recompute.NEVER,) * 4


def test_stages_of_a_candidate_price_bytes_all_or_none() -> None:
    """A plan's limit of memory, by which stages are divided when they run, is that of all."""
    task = replace(task_on(2, 2), policies=MEMORY_POLICIES)
    priced = [
        [own.option.policy.byte_s > 0 for own in found.stages] for found in find_on_meshes(task)[0]
    ]
    assert all(len({*own}) == 1 for own in priced)
    assert {own[0] for own in priced} == {True, False} and max(map(len, priced)) > 1


def test_wide_resnet_of_alpas_paper_fits_a_device_with_as_few_microbatches() -> None:
    subject = next(subjects((RESNET,)))
    plan = plan_on_meshes(subject.task("p3.16xlarge"))
    assert (subject.num_devices, plan.num_microbatches) == (1, subject.num_microbatches)
    (again,) = plan.recompute
    assert isinstance(again, RecomputeLayers) and 0 < len(again.layers) < len(plan.layers)


@pytest.mark.parametrize("family", ["one_f_one_b", "eager_1f1b", "gpipe"])
def test_what_a_mesh_keeps_is_no_less_than_its_schedule_does(family: str) -> None:
    task = replace(task_on(1, 2), families=[getattr(penstock.schedules, family)])
    (best, *_), _ = find_on_meshes(task)
    plan = best.plan
    kept = [own.kept for own in best.stages]
    sizes = Sizes(
        kept_bytes=tuple(own.graph for own in kept),
        input_bytes=tuple(own.inputs for own in kept),
    )
    stages = range(plan.num_stages)
    schedule = add_recompute(plan.schedule(plan.num_stages, M), stages, stages)
    assert plan.predicted_stages is not None
    pairs = zip(peak_bytes(schedule, sizes), plan.predicted_stages, strict=True)
    for (own, told), of_stage in zip(pairs, kept, strict=True):
        assert own <= told.kept_bytes + 1 and told.kept_bytes - of_stage.inputs <= own
