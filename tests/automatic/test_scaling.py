"""Plans for several numbers of devices are those of each, and share what they are made from."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from math import inf, prod
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import penstock
from penstock.automatic.scaling import part_of, scale
from penstock.automatic.target import Target
from penstock.errors import ConfigError, PlanError
from penstock.planner import mesh_costs
from penstock.planner.candidates import Constraints
from penstock.planner.make_plan import choose_on_meshes, plan_profile
from penstock.planner.mesh_plans import _Search, find_on_meshes
from penstock.planner.mesh_task import MeshTask
from penstock.planner.plan import Plan
from penstock.planner.submeshes import Hosts, Task
from penstock.sharding.search import Search
from penstock_recipes.zoo import gpt
from tests.few_devices import cluster
from tests.mesh_tasks import mesh_task

BATCH, LENGTH = 16, 32


def target(num_layers: int = 2) -> Target:
    with torch.device("meta"):
        model = gpt(num_layers=num_layers, width=128, num_heads=4, num_words=64, max_length=LENGTH)
        words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    loss = torch.nn.functional.mse_loss
    return Target.of(model, words, torch.zeros(BATCH, LENGTH, 64), loss)


def test_each_count_has_the_plan_of_its_own_search_and_programs_are_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Counter[object]()

    def counted(graph: Any, names: Any, part: Any, ready: Any, costs: Any, **how: Any) -> Search:
        made[costs.mesh, len(costs.devices) > 2] += 1
        return Search(graph, names, part, ready, costs, **how)

    where, own = cluster(2, near=1e12), target()
    asked = Constraints(batch_size=BATCH, num_microbatches=2)
    with monkeypatch.context() as patch:
        patch.setattr(mesh_costs, "Search", counted)
        scaling = scale(own, where, (4, 1, 2), constraints=asked, sharding="zero1")
    assert made and set(made.values()) == {1}
    assert [each.num_devices for each in scaling.counts] == [1, 2, 4]
    (profile,) = own.profiles_for(where, (1, 16), measure=False)
    for each in scaling.counts:
        there = part_of(where, each.num_devices)
        alone = plan_profile(profile, there, BATCH, constraints=asked, sharding="zero1")
        assert each.choice is not None
        assert each.choice.plan.predicted_step_s == alone.plan.predicted_step_s
        assert each.choice.plan.placement == alone.plan.placement


def test_figures_are_those_of_the_step_and_a_count_that_lacks_memory_is_a_row() -> None:
    own = target()
    asked = Constraints(batch_size=BATCH, num_microbatches=2)
    where = cluster(2, near=1e12, memory_bytes=7_500_000)
    scaling = scale(own, where, (1, 2, 4), constraints=asked, sharding="zero1")
    heads, *rows = scaling.rows(num_samples=BATCH * 3600)
    assert heads[2] == "tokens/s"
    assert rows[0][1:-1] == ("-",) * 5 and "lack" in rows[0][-1]
    entry = json.loads(scaling.to_json())[0]
    assert entry == {"devices": 1, "plan": None, "missing": rows[0][-1]}
    first, second = scaling.figures[2], scaling.figures[4]
    assert first.efficiency == 1
    assert second.efficiency == pytest.approx(first.step_s / second.step_s / 2)
    operators = own.profile((16,), where.device_of(0)).sizes[0]
    kinds = [operators.layer(n) for n in range(len(operators.kind_of))]
    flops = sum(x.flops * x.count for kind in kinds for x in kind.operators)
    assert first.mfu == pytest.approx(flops / (first.step_s * 2 * 1e11))
    assert float(rows[1][5]) == pytest.approx(2 * first.step_s, rel=1e-3)  # 3600 steps, in hours


def test_a_part_of_a_cluster_is_of_one_host_or_of_whole_hosts() -> None:
    where = replace(cluster(4), name="4 x few")
    assert len(part_of(where, 3).places) == 3
    assert (part_of(where, 4).name, part_of(where, 12).name) == ("few", "3 x few")
    assert len(part_of(penstock.Cluster.load("4 x p3.16xlarge"), 2).places) == 2
    with pytest.raises(ConfigError, match="6 devices are no whole hosts of few, which have 4"):
        part_of(where, 6)
    with pytest.raises(ConfigError, match="2 kinds of hosts"):
        part_of(cluster(1, 2), 2)


@cache
def all_tried() -> tuple[MeshTask, Plan]:
    """Return a task, and its plan of all numbers of micro-batches."""
    with torch.device("meta"):
        model = gpt(num_layers=4, width=128, num_heads=4, num_words=64, max_length=LENGTH)
        words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    task = mesh_task(model, words, cluster(1, 1, far=1e9), sharding="zero1")
    return task, choose_on_meshes(task).plan


@pytest.mark.parametrize(("first_number", "tried"), ((1, {1, 2, 4, 8, 16}), (16, {8, 16})))
def test_a_climb_ends_where_all_numbers_would(
    first_number: int, tried: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (task, best), looks = all_tried(), list[int]()
    look = _Search.look

    def counted(self: Any, number: int, *more: Any) -> None:
        looks.append(number)
        look(self, number, *more)

    monkeypatch.setattr(_Search, "look", counted)
    plan = choose_on_meshes(replace(task, first_number=first_number)).plan
    assert plan.predicted_step_s == best.predicted_step_s
    assert plan.num_microbatches == best.num_microbatches == 16
    assert looks[0] == first_number and set(looks) == tried


def test_a_climb_begins_where_something_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    task, _ = all_tried()
    step_s, looks = {16: 5.0, 8: 4.0, 4: 6.0}, list[int]()

    def look(self: Any, number: int, *more: Any) -> None:
        looks.append(number)
        if number in step_s:
            own = SimpleNamespace(num_microbatches=number)
            found = SimpleNamespace(step_s=step_s[number], prices=own, is_bound=False)
            self.candidates.append(found)

    monkeypatch.setattr(_Search, "look", look)
    (best, *_), _ = find_on_meshes(replace(task, first_number=1))
    assert best.prices.num_microbatches == 8
    assert [*dict.fromkeys(looks)] == [1, 16, 8, 4]


def test_stages_that_fit_1f1b_alone_are_an_answer() -> None:
    # the first of two stages keeps 2 of the bytes, and eagerly 3
    prices = np.full((1, 5, 2, 3), inf)
    for layer in range(2):
        prices[0, :, layer, layer + 1] = 1.0, 0.0, 1.0, 0.0, 0.0
    sized = Task(2, [Hosts(1, 2, 2.0)], lambda mesh: prices, 4)
    task = cast(MeshTask, SimpleNamespace(limit_s=inf, first_number=None))
    (answer,) = _Search(task)._answers(sized)
    assert [(own.start, own.end) for own in answer.stages] == [(0, 1), (1, 2)]


def test_meshes_of_a_host_of_many_devices_are_powers_of_two_and_divisors() -> None:
    with torch.device("meta"):
        layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        task = mesh_task(layers, torch.zeros(64, 64), cluster(18), 1, "zero1").quick(1)
    choose_on_meshes(task)
    shared: Any
    (shared,) = task.searches.values()
    shapes = {shape for _, shape in shared}
    assert {prod(shape) for shape in shapes} == {1, 2, 3, 4, 6, 8, 9, 16, 18}
    two = {shape for shape in shapes if len(shape) == 2}
    assert two == {(2, 2), (3, 2), (4, 2), (4, 4), (8, 2), (9, 2)}


@pytest.mark.parametrize("spare", [-1, 1])
def test_a_state_is_refused_before_any_program_where_all_devices_have_no_room_for_it(
    spare: int,
) -> None:
    width, copies = 64, 4  # a weight, its gradient and Adam's two moments
    with torch.device("meta"):
        layers = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in "ab"))
        half_bytes = copies * next(layers.parameters()).nbytes
        where = cluster(2, memory_bytes=half_bytes + spare)
        task = mesh_task(layers, torch.zeros(4, width), where, 2)
    with pytest.raises(PlanError, match="those that need least lack") as refused:
        choose_on_meshes(task)
    is_refused = "at least 1 bytes on" in str(refused.value)
    assert is_refused == (not task.searches) == (spare < 0)
