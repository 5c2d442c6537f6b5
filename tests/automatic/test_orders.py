"""On unlike hosts the stages are on those that suit them, in whatever order they are described."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise, permutations

import pytest
import torch
from torch import nn

import penstock
from benchmarks.alpa_paper.baselines import RestrictedPrices
from penstock.costs.cluster.hosts import Device, Host, Link
from penstock.planner.mesh_task import MeshTask
from penstock.planner.plan import Plan
from penstock.planner.submeshes import Submesh
from tests.mesh_tasks import mesh_task, plan_on_meshes

PEAKS = {"fast": 4e9, "slow": 1e9}
LINKS = {"fast": 1e9, "slow": 3e7}
WIDTH, NUM_LAYERS = 64, 6


def task_on(order: Sequence[str], heavy: Sequence[int], num_layers: int = NUM_LAYERS) -> MeshTask:
    """Return layers of which some are heavy, for hosts of a device each: fast ones are near."""
    inner = [1024 if n in heavy else 256 for n in range(num_layers)]
    layers = [nn.Sequential(nn.Linear(WIDTH, n), nn.Linear(n, WIDTH)) for n in inner]
    kinds = [(kind, len([*own])) for kind, own in groupby(order)]
    where = penstock.Cluster(
        name="unlike",
        devices={
            name: Device(
                name=name, flops_per_s={"float32": peak}, bytes_per_s=1e12, memory_bytes=1 << 30
            )
            for name, peak in PEAKS.items()
        },
        hosts=tuple(
            Host(name=f"{kind}{n}", devices=(kind,), count=count, network=kind)
            for n, (kind, count) in enumerate(kinds)
        ),
        links={name: Link(bytes_per_s=speed, latency_s=1e-6) for name, speed in LINKS.items()},
    )
    return mesh_task(layers, torch.zeros(512, WIDTH), where, 32)


def kinds_of(plan: Plan) -> list[str]:
    """Return the kind of the device of each stage."""
    assert plan.cluster is not None
    return [plan.cluster.places[device].kind for (device,) in map(plan.devices_of, stages(plan))]


def stages(plan: Plan) -> range:
    return range(plan.num_stages)


@pytest.mark.parametrize(
    ("heavy", "wanted"),
    [
        ([0], ["fast", "slow"]),
        ([NUM_LAYERS - 1], ["slow", "fast"]),
        ([0, NUM_LAYERS - 1], ["fast", "slow", "fast"]),
    ],
)
def test_heavy_ends_are_on_fast_hosts_wherever_these_stand(
    heavy: list[int], wanted: list[str]
) -> None:
    plans = [plan_on_meshes(task_on(own, heavy)) for own in sorted({*permutations(wanted)})]
    for plan in plans:
        assert kinds_of(plan) == wanted
        assert plan.predicted_step_s == pytest.approx(plans[0].predicted_step_s, rel=1e-12)
        assert plan == Plan.from_json(plan.to_json())
        assert plan.placement.places == (*stages(plan),)
        ranks = [own[0][0] for own in plan.placement.ranks]
        assert (plan.placement.stage_places is None) == (ranks == sorted(ranks))


ORDERS = [*permutations(PEAKS)]


@pytest.mark.parametrize(
    ("heavy", "order"),
    [
        *(([], ORDERS[0]), ([0], ORDERS[1]), ([3], ORDERS[0])),
        pytest.param([1], ORDERS[1], marks=pytest.mark.slow),
        pytest.param([NUM_LAYERS - 1], ORDERS[0], marks=pytest.mark.slow),
    ],
)
def test_the_plan_is_the_best_of_those_of_each_order(
    heavy: list[int], order: Sequence[str]
) -> None:
    task, found = task_on(order, heavy), dict[int, float]()

    def begins(start: int, end: int, submesh: Submesh, *, first: int) -> bool:
        return (start == 0) == (submesh.kind == first)

    for first in range(2):
        allow = partial(begins, first=first)
        own = plan_on_meshes(replace(task, prices=partial(RestrictedPrices, allow=allow)))
        assert own.devices_of(0) == (first,) and own.predicted_step_s is not None
        found[first] = own.predicted_step_s
    assert found[0] != found[1]
    assert plan_on_meshes(task).predicted_step_s == min(found.values())


@pytest.mark.parametrize("order", sorted({*permutations(("fast", "fast", "slow"))}))
def test_handing_over_takes_the_link_to_the_next_host(order: list[str]) -> None:
    plan = plan_on_meshes(task_on(order, [0, NUM_LAYERS - 1]))
    assert plan.cluster is not None and plan.predicted_stages is not None
    assert plan.num_stages == 3
    for before, after in pairwise(stages(plan)):
        (here,), (there,) = plan.devices_of(before), plan.devices_of(after)
        route, own = plan.cluster.route(here, there), plan.predicted_stages[before]
        seconds = 2 * (route.latency_s + own.sent_bytes / route.bytes_per_s)
        assert own.handover_s == pytest.approx(seconds)


def test_devices_that_would_not_make_a_step_faster_stay_unused() -> None:
    """Here stages on hosts of several kinds cannot be, and there are fewer layers than hosts."""
    task = task_on(("fast", "slow", "fast"), [0, 1], num_layers=2)
    plan = plan_on_meshes(task)
    assert {*plan.placement.ranks} == {((0,),), ((2,),)} and plan.placement.idle == (1,)
    assert plan.placement.num_ranks == 3 and plan == Plan.from_json(plan.to_json())
    assert "devices 1 stay unused: with them a step takes no less" in plan.why
