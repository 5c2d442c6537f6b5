"""Models with more layers than wanted are clustered before stages are cut at ends of clusters."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.costs.counting.count import record_graph
from penstock.errors import ConfigError
from penstock.model.capture.capture import resolve_layers
from penstock.planner.clustering import MOST_CLUSTERS, clustered
from tests.few_devices import cluster
from tests.mesh_tasks import mesh_task, plan_meshes

INPUTS = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
WHERE = cluster(1, 2, far=1e9, flops_per_s={"float32": 1e8}, bytes_per_s=1e8, torch_type="cpu")


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh())


class Chain(nn.Module):
    """Layers as attributes, with functions between them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        for number in range(count):
            setattr(self, f"linear{number}", nn.Linear(16, 16))

    def forward(self, values: Tensor) -> Tensor:
        for number in range(self.count):
            values = torch.tanh(getattr(self, f"linear{number}")(values))
        return values


class Nested(nn.Module):
    """A layer, and in it all that follows."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.own = nn.Linear(16, 16)
        self.inner = Nested(depth - 1) if depth else nn.Identity()

    def forward(self, values: Tensor) -> Tensor:
        inner: Tensor = self.inner(torch.tanh(self.own(values)))
        return inner


def sizes(spans: Sequence[tuple[int, int]]) -> list[int]:
    return [end - start for start, end in spans]


def test_a_model_of_96_alike_blocks_becomes_alike_clusters() -> None:
    layers = nn.Sequential(*(linear() for _ in range(96)))
    task = mesh_task(layers, INPUTS, WHERE, 2, num_layers=32)
    assert sizes(task.model.spans) == [3] * 32
    graph = task.graph_of(2)
    alike = {tuple(graph.signature(n) for n in range(*span)) for span in task.model.spans}
    assert len(alike) == 2  # the first one makes no gradient of its input


def test_clusters_end_where_few_bytes_cross_and_keep_together_what_is_to_be() -> None:
    wide = [(16, 64), (64, 64), (64, 16), (16, 64), (64, 16), (16, 64), (64, 64), (64, 16)]
    model = nn.Sequential(*(nn.Linear(*own) for own in wide))
    layers = resolve_layers(model, INPUTS)
    graph, device = record_graph(layers, INPUTS), WHERE.device_of(0)
    assert sizes(clustered(graph, layers.spans, device, 3)) == [3, 2, 3]
    together = [(0, 1), (1, 4), (4, 5), (5, 8)]
    found = clustered(graph, together, device, 3)
    assert len(found) == 3 and {end for _, end in found} <= {end for _, end in together}


def test_a_layer_longer_than_all_others_is_a_cluster_beside_them() -> None:
    layers = [*(nn.Linear(16, 16) for _ in range(40)), nn.Linear(16, 4096)]
    task = mesh_task(layers, INPUTS, WHERE, 2, num_layers=20)
    assert len(task.model.spans) == 20
    graph, device = task.graph_of(2), WHERE.device_of(0)
    for count in range(1, 42):  # whatever is asked for is found
        spans = clustered(graph, [(n, n + 1) for n in range(41)], device, count)
        assert len(spans) == count and spans[-1][1] == 41


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Nested(6), id="nested"),
        pytest.param(
            lambda: nn.Sequential(*(linear() for _ in range(150))),
            id="long",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: Chain(300), id="long attributes", marks=pytest.mark.slow),
        pytest.param(
            lambda: nn.Sequential(*(linear() for _ in range(500))),
            id="very long",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_models_of_any_form_are_planned_and_stages_end_where_clusters_do(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    task = mesh_task(model, INPUTS, WHERE, 4)
    ends = [end for _, end in task.model.spans]
    assert len(ends) == min(MOST_CLUSTERS, len(task.names)) and ends[-1] == len(task.names)
    plan = plan_meshes(model, INPUTS, WHERE, num_microbatches=4)
    at, cuts = 0, []
    for size in plan.partition:
        cuts.append(at := at + size)
    assert len(cuts) > 1 and set(cuts) <= set(ends)
    pipe = penstock.Pipeline(
        model, partition=plan.partition, num_microbatches=4, example_inputs=INPUTS
    )
    assert torch.allclose(pipe.eval_step(INPUTS), model(INPUTS), atol=1e-6)


def test_more_clusters_than_layers_are_refused() -> None:
    layers = [nn.Linear(16, 16) for _ in range(3)]
    with pytest.raises(ConfigError, match="num_layers=4, and the model has 3 layers that may be"):
        plan_meshes(layers, INPUTS, WHERE, num_layers=4)
    with pytest.raises(ConfigError, match="num_layers=0; it must be a whole number"):
        penstock.parallelize(layers, INPUTS, cluster=cluster(1), num_layers=0)
