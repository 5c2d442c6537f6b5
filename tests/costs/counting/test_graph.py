"""A forward is recorded as calls of torch's functions, with edges and with all that each costs."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import capture
from penstock.costs.counting.count import count_layers, record_graph
from penstock.costs.counting.graph import Call, Graph
from penstock.costs.records import VIEW, Operator, Part
from penstock.model.layer_list import as_layers
from tests.costs.counting.counted import layers_of
from tests.recipes.zoo_members import ZOO_MEMBERS


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


def graph_of(*modules: nn.Module) -> Graph:
    return record_graph(as_layers(list(modules)), torch.randn(3, 8))


def names(calls: list[Call]) -> list[str]:
    return [call.function.rpartition(".")[2] for call in calls]


def test_edges_lead_from_the_call_that_gives_a_tensor_to_those_that_take_it() -> None:
    graph = graph_of(Block())
    norm, up, gelu, down, add = graph.of_layer(0)
    assert names(graph.of_layer(0)) == ["layer_norm", "linear", "gelu", "linear", "add"]
    assert [norm.gives[0], up.gives[0], gelu.gives[0]] == [
        up.takes[0],
        gelu.takes[0],
        down.takes[0],
    ]
    assert set(add.takes) == {norm.takes[0], down.gives[0]}
    given = graph.tensors[add.gives[0]]
    assert given.shape == (3, 8) and given.maker == graph.calls.index(add)
    assert [graph.tensors[n].name for n in up.takes[1:]] == ["0.up.weight", "0.up.bias"]


def test_a_call_has_the_operators_of_its_forward_and_of_its_backward() -> None:
    _, up, *_ = graph_of(nn.Linear(8, 8), Block()).of_layer(1)
    assert up.function == "torch.nn.functional.linear"
    products = [(o.part, o.dims) for o in up.operators if o.name == "gemm"]
    assert products[0] == (Part.FORWARD, (3, 16, 8))
    assert Counter(part for part, _ in products) == Counter(Part)


def test_a_call_saves_tensors_by_number_and_the_rest_as_bytes() -> None:
    norm, up, gelu, *_ = graph_of(nn.Linear(8, 8), Block()).of_layer(1)
    assert norm.takes[0] in norm.saved and norm.inner_bytes == 2 * 3 * 4  # means, deviations
    assert set(up.saved) == set(up.takes[:2])
    assert gelu.saved == gelu.takes and not gelu.inner_bytes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if number % 3 else [])
        for number, name in enumerate(ZOO_MEMBERS)
    ],
)
def test_what_layers_cost_is_the_sum_over_their_calls(name: str) -> None:
    model, inputs = ZOO_MEMBERS[name]()
    layers = layers_of(model, inputs)
    graph, counted = record_graph(layers, inputs), count_layers(layers, inputs)
    for n in range(len(layers)):
        calls = graph.of_layer(n)
        assert all(call.function for call in calls)
        found = Counter[Operator](o for call in calls for o in call.operators)
        kind = counted.layer(n)
        assert sum(o.count * o.flops for o in kind.operators) == sum(
            o.flops * times for o, times in found.items()
        )
        assert sum(o.count for o in kind.operators) == found.total()
        assert kind.draws == any(call.draws for call in calls)


def test_layers_that_are_alike_have_one_signature() -> None:
    graph = graph_of(Block(), Block(), nn.Linear(8, 8), Block())
    first, second, other, last = map(graph.signature, range(4))
    assert first != second  # the model's input wants no gradient
    assert second == last != other


def test_a_layer_has_one_signature_wherever_it_runs() -> None:
    """Processes compare signatures, and each has another device."""

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(x.shape[1], device=x.device) + torch.ones(1, device=where)

    found = set()
    for where in ("cpu", "meta"):
        layers = as_layers([Counts()])
        found.add(record_graph(layers, torch.zeros(2, 8, device=where)).signature(0))
    assert len(found) == 1


def test_what_a_captured_model_does_between_blocks_has_calls() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x).tanh()
            return x

    inputs = torch.randn(3, 8)
    graph = record_graph(capture(Model(), inputs, blocks=["blocks.*"]), inputs)
    *_, tanh, add = graph.of_layer(1)
    assert names([tanh, add]) == ["tanh", "add"]
    assert tanh.gives[0] in add.takes
    kernels = [o.part for o in tanh.operators if o.name != VIEW]
    assert kernels == [Part.FORWARD, Part.INPUT]


def test_code_that_no_function_shows_is_a_call_without_a_name() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch._C._VariableFunctions.mul(x, 2)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * 2

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Doubled.apply(x)

    calls = graph_of(nn.Linear(8, 8), Twice()).of_layer(1)
    parts = [o.part for call in calls for o in call.operators]
    assert parts == [Part.FORWARD, Part.INPUT] or parts == [Part.INPUT, Part.FORWARD]
    assert "" in [call.function for call in calls]


def test_a_tensor_that_is_changed_in_place_gets_a_new_number() -> None:
    class Change(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y.add_(1)
            return y.relu()

    double, add, relu = graph_of(Change()).of_layer(0)
    assert add.takes == double.gives and add.gives != double.gives
    assert relu.takes == add.gives
