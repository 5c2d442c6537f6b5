"""Baselines keep to their restrictions, and none is faster than the plan that has none."""

from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import accumulate
from math import prod

import numpy as np
import pytest
import torch

from benchmarks.alpa_paper.baselines import (
    BASELINES,
    equal_stages,
    even_stages,
    plan_baseline,
)
from penstock.costs.cluster import Cluster
from penstock.costs.counting.count import record_graph
from penstock.costs.layer_facts import LayerFacts
from penstock.errors import ConfigError, PlanError
from penstock.model.capture.capture import resolve_layers
from penstock.planner.arguments import Model
from penstock.planner.mesh_costs import MeshPrices
from penstock.planner.mesh_task import MeshTask
from penstock.planner.plan import Plan
from penstock.planner.submeshes import MEMORY_POLICIES, MemoryPolicy, Stage, Submesh
from penstock.runtime.microbatches import first_microbatch
from penstock.runtime.planning import facts_of
from penstock.types import Recompute
from penstock_recipes.zoo.gpt_family import gpt
from tests.few_devices import cluster
from tests.mesh_tasks import mesh_task, on_mesh, plan_on_meshes

BATCH_SIZE, NUM_LAYERS = 64, 4


def decoder(num_layers: int, num_positions: int) -> MeshTask:
    """Return a decoder, and four V100s."""
    with torch.device("meta"):
        model = gpt(num_layers=num_layers, width=512, num_heads=8, num_words=1024, tied=False)
        words = torch.zeros(BATCH_SIZE, num_positions, dtype=torch.long)
    layers = resolve_layers(model, words[:1])
    cluster = Cluster.load("p3.16xlarge")
    (host,) = cluster.hosts
    return MeshTask(
        model=Model(facts_of(layers), layers.spans),
        names=[step.path for step in layers],
        graph_of=cache(lambda number: record_graph(layers, first_microbatch(words, number))),
        cluster=replace(cluster, hosts=(replace(host, devices=host.devices[:4]),)),
        batch_size=BATCH_SIZE,
        num_microbatches=16,
    )


@pytest.fixture(scope="module")
def task() -> MeshTask:
    """Return a decoder of four blocks, and four V100s."""
    return decoder(NUM_LAYERS, 1024)


@pytest.fixture(scope="module")
def plans(task: MeshTask) -> dict[str, Plan]:
    return {name: plan_baseline(name, task) for name in BASELINES}


def step_s(plan: Plan) -> float:
    assert plan.predicted_step_s is not None
    return plan.predicted_step_s


def sizes_of(plan: Plan) -> list[int]:
    shapes = plan.placement.shard_shapes or ((1,),) * plan.num_stages
    return [prod(shape) for shape in shapes]


def num_blocks(plan: Plan) -> list[int]:
    ends = list(accumulate(plan.partition))
    starts = [0, *ends[:-1]]
    names = [layer.name for layer in plan.layers]
    pairs = zip(starts, ends, strict=True)
    return [sum("blocks" in name for name in names[start:end]) for start, end in pairs]


@pytest.mark.slow
def test_the_unrestricted_plan_is_at_least_as_fast_as_each_baseline(task, plans) -> None:
    own = step_s(plan_on_meshes(task))
    assert {n: step_s(p) for n, p in plans.items() if step_s(p) < own} == {}


@pytest.mark.parametrize(
    ("where", "num_layers", "num_microbatches", "wanted"),
    [
        (cluster(2, 2, far=3e8, memory_bytes=10_000_000), 6, 8, ("stages", "one_f_one_b")),
        pytest.param(cluster(2, 2, far=3e7), 6, 32, ("stages", "gpipe"), marks=pytest.mark.slow),
        pytest.param(
            *(cluster(4, near=1e9), 2, 1, ("zero2", "one_f_one_b")), marks=pytest.mark.slow
        ),
    ],
)
def test_no_baseline_is_faster_where_schedules_or_zero_decide(
    where: Cluster, num_layers: int, num_microbatches: int, wanted: tuple[str, str]
) -> None:
    """Memory for 1F1B only; links so slow that all micro-batches are sent ahead; sums of gradients
    that take as long as the work.
    """
    with torch.device("meta"):
        model = gpt(num_layers=num_layers, width=128, num_heads=4, num_words=64, max_length=32)
        words = torch.zeros(32, 32, dtype=torch.long)
    small = mesh_task(model, words, where, num_microbatches)
    plan = plan_on_meshes(small)
    assert (plan.sharding if plan.num_stages == 1 else "stages", plan.schedule.name) == wanted
    for name in BASELINES:
        with suppress(PlanError):
            assert step_s(plan_baseline(name, small)) >= step_s(plan), name


@pytest.mark.slow
def test_each_baseline_keeps_to_its_restriction(plans: dict[str, Plan]) -> None:
    assert sizes_of(plans["intra"]) == sizes_of(plans["deepspeed"]) == [4]
    assert plans["deepspeed"].sharding in ("data", "zero1", "zero2", "zero3", "expert")
    assert sizes_of(plans["inter"]) == sizes_of(plans["gpipe"]) == [1] * 4
    assert plans["gpipe"].schedule.name == "gpipe"
    assert set(plans["gpipe"].recompute) == {Recompute.STAGE}
    assert plans["pp-dp"].sharding in ("data", None)
    for name in ("equal-layers", "megatron"):
        assert len(set(num_blocks(plans[name]))) == 1
    assert len(set(plans["megatron"].placement.shard_shapes or ())) <= 1
    assert plans["megatron"].sharding in ("data", "megatron", "grid", None)


@pytest.mark.parametrize("wanted", [pytest.param("zero1", marks=pytest.mark.slow), "zero2"])
def test_deepspeed_keeps_more_in_slices_where_less_does_not_fit(wanted: str) -> None:
    """With memory for a ZeRO and no more, those that keep less in slices do not fit, and those
    that keep more are slower.
    """
    small = decoder(2, 256)
    small = replace(small, policies=MEMORY_POLICIES[:1])
    whole = small.names, small.model.spans, small.cluster, 16
    mesh, found = Submesh(0, 1, 4), {}
    for plan in ("data", "zero1", "zero2", "zero3"):
        prices_by_plan = MeshPrices(small.graph_of(16), *whole, plan)
        found[plan] = on_mesh(prices_by_plan, 0, len(small.names), mesh)
    prices = [*found.values()]
    needs = {n: p.stay_bytes + p.microbatch_bytes for n, p in zip(found, prices, strict=True)}
    assert sorted(needs.values(), reverse=True) == [*needs.values()]
    assert sorted(price.seconds for price in prices) == [price.seconds for price in prices]
    (kind,) = {kind for host in small.cluster.hosts for kind in host.devices}
    device = replace(small.cluster.devices[kind], memory_bytes=int(needs[wanted]) + 1)
    cluster = replace(small.cluster, devices={kind: device})
    assert plan_baseline("deepspeed", replace(small, cluster=cluster)).sharding == wanted


def test_a_grid_keeps_less_than_data_and_more_than_megatron(task: MeshTask) -> None:
    kept = []
    for plan, shape in (("data", (4,)), ("grid", (2, 2)), ("megatron", (4,))):
        graph, how = task.graph_of(16), (task.names, task.model.spans, task.cluster, 16, plan)
        mesh = Submesh(0, 1, 4, shape=shape)
        found = on_mesh(MeshPrices(graph, *how), 0, len(task.names), mesh)
        assert found.option.shape == shape
        kept.append(found.stay_bytes)
    whole, half, quarter = kept
    assert whole > half > quarter


def test_a_last_stage_is_searched_without_a_recompute_in_1f1b(task: MeshTask) -> None:
    of_task = (task.graph_of(16), task.names, task.model.spans, task.cluster)
    policies = MemoryPolicy(Recompute.STAGE), MemoryPolicy(Recompute.LAYERS)
    prices = MeshPrices(*of_task, 16, "auto", policies)
    mesh, last = Submesh(0, 1, 2), len(task.names)
    found, every = prices.of_stages(mesh, is_1f1b=True), prices.of_stages(mesh)
    assert (found[..., :last] == every[..., :last]).all()
    for number, option in enumerate(prices.options(mesh)):
        own = prices.on_mesh(Stage(3, last, mesh), option)
        assert (own.option, tuple(every[number, :, 3, last])) == (option, own[:5])
        again_s = own.forward_s * (option.policy.recompute is Recompute.LAYERS)
        assert found[number, 0, 3, last] == pytest.approx(own.forward_s + own.backward_s + again_s)
        assert own.seconds == pytest.approx(2 * own.forward_s + own.backward_s)


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("eBBBBh", [[(0, 6)], [(0, 3), (3, 6)], [(0, 2), (2, 3), (3, 4), (4, 6)]]),
        ("abc", [[(0, 3)], [(0, 1), (1, 2), (2, 3)]]),
    ],
)
def test_equal_stages_have_as_many_of_the_layers_that_repeat(kinds, found) -> None:
    layers = [LayerFacts(str(n), kind, 0, "") for n, kind in enumerate(kinds)]
    assert list(equal_stages(layers, 4)) == [set(stages) for stages in found]


@pytest.mark.parametrize(
    ("weights", "cuts", "found"),
    [
        ([1, 1, 1, 3], [1, 2, 3, 4], [[(0, 4)], [(0, 3), (3, 4)], [(0, 2), (2, 3), (3, 4)]]),
        ([1, 1, 1, 3], [2, 4], [[(0, 4)], [(0, 2), (2, 4)]]),
    ],
)
def test_even_stages_end_at_the_cuts_nearest_to_even_shares(weights, cuts, found) -> None:
    assert list(even_stages(weights, cuts, 3)) == [set(stages) for stages in found]


def test_no_stage_of_one_host_is_on_two(task: MeshTask) -> None:
    (own,) = BASELINES["one-host"](task)
    every = len(task.names)
    prices = own.prices(task.graph_of(16), task.names, task.model.spans, task.cluster, 16)
    assert np.isfinite(prices.of_stages(Submesh(0, 1, 4))[:, :, 0, every]).all()
    assert not prices.options(Submesh(0, 2, 4))


def test_an_unknown_baseline_is_refused_with_those_there_are(task: MeshTask) -> None:
    with pytest.raises(ConfigError, match="no baseline 'alpa'; there are intra, inter, gpipe"):
        plan_baseline("alpa", task)
