"""The host issues operators while devices run earlier ones: the slower of the two counts."""

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.costs.records import Part as Of
from penstock.planner.mesh_costs import MeshPrices, OnMesh
from penstock.planner.pricing import Pricing
from penstock.planner.submeshes import MemoryPolicy, Submesh
from penstock.sharding.costs import DIVIDED_AS, Costs
from penstock.sharding.named import ready_plan
from penstock.sharding.search import Part, Search
from penstock.types import Recompute
from tests.few_devices import cluster
from tests.mesh_tasks import mesh_task, on_mesh

WIDTH = 512
NUM_CALLS = 10
"""Of both layers."""
POLICIES = [MemoryPolicy(), MemoryPolicy(Recompute.STAGE)]


def where(issue_s: float, torch_type: str = "cuda") -> penstock.Cluster:
    return cluster(2, near=1e13, issue_s=issue_s, torch_type=torch_type)


def layers() -> list[nn.Module]:
    """Return a layer of many small operators, and one of a large product."""
    small = nn.Sequential(*(nn.Tanh() for _ in range(8)))
    large = nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH))
    return [small, large]


def stage(issue_s: float, ends: tuple[int, int], devices: int = 1, **how: Any) -> OnMesh:
    with torch.device("meta"):
        task = mesh_task(layers(), torch.zeros(16, WIDTH), where(issue_s), 2)
    given = task.graph_of(2), task.names, task.model.spans, task.cluster, 2, "data"
    return on_mesh(MeshPrices(*given, **how), *ends, Submesh(0, 1, devices))


def test_host_and_devices_overlap_over_a_whole_stage() -> None:
    small, large, both = (stage(0.0, ends) for ends in ((0, 1), (1, 2), (0, 2)))
    issue_s = large.forward_s / 20  # more than small operators take, less than large ones do
    slow, same = stage(issue_s, (0, 1)), stage(issue_s, (0, 2))
    assert slow.forward_s > small.forward_s
    assert (same.forward_s, same.backward_s) == (both.forward_s, both.backward_s)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_host_of_each_device_issues_all_operators_and_finds_the_shards_of_calls(
    policy: MemoryPolicy,
) -> None:
    issue_s = stage(0.0, (0, 2)).seconds
    runs = 2 if policy.recompute is Recompute.STAGE else 1
    one, two = (stage(issue_s, (0, 2), devices, policies=[policy]) for devices in (1, 2))
    assert two.forward_s == pytest.approx(one.forward_s + NUM_CALLS * DIVIDED_AS * issue_s)
    assert one.backward_s == two.backward_s
    assert one.seconds == pytest.approx(runs * one.forward_s + one.backward_s)
    with torch.device("meta"):
        calls = mesh_task(layers(), torch.zeros(16, WIDTH), where(0.0), 2).graph_of(2).calls
    every = [operator for call in calls for operator in call.operators]
    forward = [operator for operator in every if operator.part is Of.FORWARD]
    assert {"view", "gemm", "elementwise"} <= {operator.name for operator in forward}
    assert one.forward_s == pytest.approx(sum(x.count for x in forward) * issue_s)
    assert one.forward_s + one.backward_s == pytest.approx(sum(x.count for x in every) * issue_s)


@pytest.mark.parametrize(
    ("torch_type", "cuda_graphs"), [("cuda", True), ("cpu", False), ("cpu", True)]
)
def test_nobody_issues_the_operators_of_a_cuda_graph_and_a_core_only_finds_shards(
    torch_type: str, cuda_graphs: bool
) -> None:
    with torch.device("meta"):
        inputs = torch.zeros(8, WIDTH)
        task = mesh_task(layers(), inputs, where(1.0, torch_type), 2)
        profile = penstock.profile(layers(), inputs, measure=False)
    graph = task.graph_of(2)
    tables = []
    for issue_s in (0.0, 1.0):
        costs = Costs((2,), where(issue_s, torch_type), 2, cuda_graphs=cuda_graphs)
        search = Search(graph, [*task.names], Part(range(2)), ready_plan("data"), costs)
        whole = Pricing(profile, where(issue_s, torch_type), cuda_graphs=cuda_graphs)
        kind = whole.cluster.places[0].kind
        ranges = search.of_ranges()
        found_s = [table[0, -1] for table in (ranges.seconds, ranges.forward_s)]
        tables.append((found_s, whole.seconds(kind, 8, 2)))
    shards_s = 0.0 if cuda_graphs else NUM_CALLS * DIVIDED_AS
    assert tables[1][0] == pytest.approx([seconds + shards_s for seconds in tables[0][0]])
    assert tables[0][1] == tables[1][1]
