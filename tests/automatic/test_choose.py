"""Plans on sub-meshes are those that one would draw, and are what the simulator says."""

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from benchmarks.alpa_paper.baselines import BASELINES
from penstock.errors import PlanError
from penstock.planner.make_plan import choose_on_meshes
from penstock.planner.mesh_costs import MeshPrices
from penstock.planner.mesh_plans import find_on_meshes
from penstock.planner.mesh_task import SHARDINGS, MeshTask
from penstock.planner.plan import Plan
from penstock.planner.submeshes import MemoryPolicy, Submesh
from penstock.sharding.costs import Costs
from penstock.sharding.program import whole_s
from penstock.sharding.search import Search
from penstock.trace.units import time_text
from penstock.types import Recompute
from penstock_recipes.zoo import gpt
from tests.costs.cluster.collective_seconds import all_gather_s
from tests.few_devices import cluster
from tests.mesh_tasks import mesh_task, on_mesh, plan_meshes, plan_on_meshes

BATCH, LENGTH = 16, 32


def planned(where: penstock.Cluster, num_microbatches: int = 4, **sizes: Any) -> Plan:
    given: dict[str, Any] = {"num_layers": 4, "width": 128, "num_heads": 4, **sizes}
    with torch.device("meta"):
        model = gpt(**given, num_words=64, max_length=LENGTH)
        words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return plan_meshes(model, words, where, num_microbatches=num_microbatches)


@cache
def two_hosts() -> Plan:
    return planned(cluster(2, 2))


def meshes(plan: Plan) -> list[int]:
    return [len(ranks[0]) for ranks in plan.placement.ranks]


def test_stages_are_cut_where_links_are_slow_and_operators_divided_where_they_are_fast() -> None:
    plan = two_hosts()
    assert meshes(plan) == [2, 2] and plan.sharding in SHARDINGS
    assert plan.placement.ranks == (((0, 1),), ((2, 3),))
    assert abs(plan.partition[0] - plan.partition[1]) <= 2


def test_where_all_links_are_fast_one_stage_has_all_devices() -> None:
    where = cluster(4, far=1e13, near=1e13)
    assert meshes(planned(where, num_microbatches=1, num_layers=2)) == [4]


def test_where_links_are_slow_everywhere_each_device_has_a_stage() -> None:
    plan = planned(cluster(1, 1, 1, far=1e9), num_microbatches=16)
    assert meshes(plan) == [1, 1, 1] and plan.sharding is None


def test_hosts_of_unlike_sizes_get_layers_by_what_they_can_do() -> None:
    plan = planned(cluster(1, 3, far=1e10))
    layers = dict(zip(meshes(plan), plan.partition, strict=True))
    assert layers.keys() == {1, 3} and layers[1] < layers[3]


def test_where_memory_is_short_stages_recompute_and_where_it_is_too_short_nothing_fits() -> None:
    plenty = two_hosts()
    assert set(plenty.recompute) == {Recompute.NEVER}
    least = 5_000_000
    tight = planned(cluster(2, 2, memory_bytes=least))
    # the last stage keeps one micro-batch, the others more
    assert tight.recompute[0] is Recompute.STAGE and Recompute.NEVER in tight.recompute
    assert tight.predicted_step_s is not None and plenty.predicted_step_s is not None
    assert tight.predicted_step_s > plenty.predicted_step_s
    with pytest.raises(PlanError, match=r"those that need least lack .* on their fullest device"):
        planned(cluster(2, 2, memory_bytes=least // 5))


def test_the_optimizer_is_counted_and_may_decide_where_stages_are_cut() -> None:
    """Stages of like seconds have 2 and 1 of three layers, and so both wide ones on a device."""
    width, samples = 1024, 4
    with torch.device("meta"):
        wide = [nn.Linear(width, width, bias=False) for _ in range(2)]
        inputs = torch.zeros(samples, width)
        layers = [*wide, nn.Linear(width, 1, bias=False)]
    where = cluster(1, 1, far=1e12)
    (task,) = BASELINES["inter"](mesh_task(layers, inputs, where, num_microbatches=2))
    one_s, _, last_s = (whole_s(task.graph_of(2), n, Costs((1,), where)) for n in range(3))
    task = replace(task, factors_of=lambda number: (1.0, 1.0, 3 * one_s / last_s))
    choice = choose_on_meshes(task)
    simulated = min(find_on_meshes(task)[0], key=lambda own: own.step_s - own.update_s)
    best, bytes_per_s = choice.candidates[0], where.device_of(0).bytes_per_s
    assert choice.plan.partition == (1, 2) and simulated.answer.stages[0].end == 2
    weight_s = (
        4 * width * width / bytes_per_s
    )  # weight, gradient, two moments: 4 are read, 3 written
    assert simulated.update_s == pytest.approx(7 * 2 * weight_s, rel=1e-12)
    assert best.update_s == pytest.approx(7 * (1 + 1 / width) * weight_s, rel=1e-12)
    assert choice.plan.predicted_step_s == choice.timeline.step_s + best.update_s
    (said,) = (line for line in choice.plan.why if "the optimizer" in line)
    assert (
        said == f"the optimizer takes {time_text(best.update_s)} of a step, where it takes longest"
    )
    long = replace(task, factors_of=lambda number: (1e6, 1e6, 1e9))
    assert not [line for line in choose_on_meshes(long).plan.why if "the optimizer" in line]


@pytest.mark.parametrize("sharding", ["data", "zero1", "zero2", "zero3"])
def test_an_optimizer_moves_what_a_device_keeps_between_steps(sharding: str) -> None:
    width, parts = 64, 1 if sharding == "data" else 2
    with torch.device("meta"):
        layers = [nn.Linear(width, width, bias=False) for _ in range(3)]
        task = mesh_task(layers, torch.zeros(8, width), cluster(2), 2, sharding)
    for policy in (MemoryPolicy(), MemoryPolicy(Recompute.LAYERS)):
        given = task.graph_of(2), task.names, task.model.spans, task.cluster, 2, sharding
        found = on_mesh(MeshPrices(*given, policies=[policy]), 0, 3, Submesh(0, 1, 2))
        assert found.update_bytes == 7 * 3 * 4 * width * width / parts


@pytest.mark.parametrize(
    ("sharding", "num_samples", "sides"),
    [("megatron", 512, 2), ("data", 512, 0), ("megatron", 8, 0)],
)
def test_a_whole_value_of_many_bytes_is_gathered_where_it_arrives(
    sharding: str, num_samples: int, sides: int
) -> None:
    """So is its gradient; a next mesh that is not given gathers as this one."""
    where, mesh = cluster(2, 2), Submesh(0, 1, 2)
    with torch.device("meta"):
        layers = [nn.Linear(256, 256) for _ in range(3)]
        task = mesh_task(layers, torch.zeros(num_samples, 256), where, 2, sharding)
    prices = MeshPrices(task.graph_of(2), task.names, task.model.spans, where, 2, sharding)
    num_bytes, route = num_samples // 2 * 256 * 4, where.route(0, 2)
    crosses_s = 2 * (route.latency_s + num_bytes / route.bytes_per_s)
    gather_s = all_gather_s(where, range(2), num_bytes)
    found_s = prices.handover_s(1, mesh, 0)
    assert gather_s > 0 and found_s == pytest.approx(crosses_s + sides * gather_s)


def entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_a_loss_is_priced_in_the_slices_of_the_logits_which_nobody_gathers() -> None:
    """Without it the model's output is whole in the end, and so is its gradient."""
    num_words, where, found = 20_000, cluster(2), dict[tuple[bool, int, int], float]()
    with torch.device("meta"):
        layers = [nn.Embedding(num_words, 64), nn.Linear(64, 64), nn.Linear(64, num_words)]
        words = torch.zeros(8, LENGTH, dtype=torch.long)
    for loss in (None, entropy):
        profile = penstock.profile(layers, words, loss=loss, targets=words, measure=False)
        task = replace(MeshTask.of(profile, where, 8, 2), factors_of=lambda number: ())
        prices = task.prices_of(2, "megatron", [MemoryPolicy()])
        for start, devices in product(range(3), (1, 2)):
            own = on_mesh(prices, start, 3, Submesh(0, 1, devices))
            found[loss is not None, start, devices] = own.seconds
        assert [prices.entering_bytes(n) for n in range(1, 3)] == [4 * LENGTH * 64 * 4] * 2
    loss_s = whole_s(prices.ended, 3, Costs((1,), where))
    gather_s = all_gather_s(where, range(2), 4 * LENGTH * num_words * 4)
    for start in range(3):
        one_s, two_s = (found[True, start, n] - found[False, start, n] for n in (1, 2))
        assert one_s == pytest.approx(loss_s)
        assert loss_s / 2 - 3 * gather_s < two_s < loss_s / 2 - gather_s
    # a measured profile has the loss in the seconds of its last layer
    assert MeshTask.of(profile, where, 8, 2).factors_of(2)[-1] == pytest.approx(1, abs=0.01)


def test_the_same_is_planned_again_and_survives_json() -> None:
    where = cluster(1, 2)
    plan = planned(where)
    assert planned(where) == plan == Plan.from_json(plan.to_json())
    assert plan.cluster == where and [*map(plan.devices_of, range(2))] == [(1, 2), (0,)]
    assert replace(plan, cluster=None).devices_of(1) == ()


def test_ways_with_the_same_price_of_a_byte_search_a_shape_once() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    task = mesh_task(layers, torch.zeros(8, 4), cluster(2), 2)
    given = task.graph_of(2), task.names, task.model.spans, task.cluster, 2, "data"
    shared = dict[object, Search]()
    tables = []
    every = MemoryPolicy(), MemoryPolicy(Recompute.STAGE), MemoryPolicy(byte_s=1e-11)
    for policy in every:
        prices = MeshPrices(*given, policies=[policy], shared=shared)
        search = prices._search(Submesh(0, 1, 2), (2,))
        tables.append(search.of_ranges(policy.byte_s))
        assert search.of_ranges(policy.byte_s) is tables[-1]
    free, recomputing, priced = tables
    assert free is recomputing and free is not priced and len(shared) == 1


def test_an_interrupted_search_gives_the_best_so_far_and_says_so() -> None:
    with torch.device("meta"):
        model = gpt(num_layers=4, width=128, num_heads=4, num_words=64, max_length=LENGTH)
        words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    whole, tried = mesh_task(model, words, cluster(2, 2), num_microbatches=4), list[Any]()

    def prices(*how: Any) -> MeshPrices:
        tried.append(how)
        if len(tried) == 2:
            raise KeyboardInterrupt
        return MeshPrices(*how)

    plan = plan_on_meshes(replace(whole, prices=prices))
    assert (
        plan.why[-1].endswith(f"interrupted in part 2 of {len(whole.tries)}") and len(tried) == 2
    )
    assert set(plan.recompute) == {Recompute.NEVER}  # the way that was looked at first
    tried[:] = [()]
    with pytest.raises(KeyboardInterrupt):
        plan_on_meshes(replace(whole, prices=prices))
