"""Layers and their values: what is named, what crosses which cut, what is refused."""

import pytest
import torch
from torch import nn

from penstock import Layer
from penstock.errors import ConfigError, PartitionError
from penstock.model.layer_list import as_layers


class Add(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


def test_a_sequential_is_a_chain_under_its_own_names() -> None:
    layers = as_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    assert [step.name for step in layers] == ["0", "1"]
    assert [step.inputs for step in layers] == [((-1, 0),), ((0, 0),)]


def test_a_value_visits_only_the_stages_that_use_it() -> None:
    layers = as_layers(
        [
            Layer(nn.Linear(2, 2), outputs="skip"),
            nn.ReLU(),
            nn.Tanh(),
            Layer(nn.Sigmoid(), outputs="x"),
            Layer(Add(), inputs=("x", "skip")),
        ]
    )
    plans = layers.plan_stages((1, 1, 1, 1, 1))
    assert [sorted(plan.exports) for plan in plans] == [[1], [2, 4], [3], [4], []]
    assert plans[4].imports == {1: ((0, 0),), 3: ((3, 0),)}


def test_a_value_used_on_several_stages_is_relayed_from_one_to_the_next() -> None:
    layers = as_layers(
        [
            Layer(nn.Linear(2, 2), outputs="a"),
            Layer(nn.ReLU(), outputs="b"),
            Layer(Add(), inputs=("a", "b"), outputs="c"),
            Layer(Add(), inputs=("a", "c")),
        ]
    )
    routes = [sorted(plan.exports) for plan in layers.plan_stages((1, 1, 1, 1))]
    assert routes == [[1], [2], [3], []]  # "a" goes 0 -> 1 (b is made from it) -> 2 -> 3


def test_the_models_input_may_be_read_again() -> None:
    layers = as_layers([nn.Linear(2, 2), nn.ReLU(), Layer(Add(), inputs=("input", "input"))])
    plans = layers.plan_stages((1, 1, 1))
    assert [plan.reads_input for plan in plans] == [True, False, False]
    assert plans[0].exports == {2: ((-1, 0),), 1: ((0, 0),)}


def test_a_transfer_names_what_crosses() -> None:
    layers = as_layers([nn.Linear(2, 2), nn.ReLU(), Layer(Add(), inputs=("input", "input"))])
    transfers = [t for plan in layers.plan_stages((1, 1, 1)) for t in plan.transfers]
    assert list(map(str, transfers)) == ["0 -> 2: input", "0 -> 1: layer 0"]


@pytest.mark.parametrize(
    "model, message",
    (
        ([], "has no layers"),
        (nn.Linear(2, 2), "is no plain nn.Sequential"),
        ([lambda x: x], "layer 0 is a function, not an nn.Module"),
        ([Layer(nn.ReLU(), inputs="skip")], "reads 'skip', which no layer before it gives"),
        ([Layer(nn.ReLU(), name="a"), Layer(nn.ReLU(), name="a")], "two layers are named 'a'"),
        ([Layer(nn.ReLU(), outputs=())], "names no outputs"),
        ([nn.LazyLinear(2)], "without a shape yet"),
    ),
)
def test_what_is_no_list_of_layers_is_refused(model: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_layers(model)  # type: ignore[arg-type]  # wrong on purpose


def test_a_tied_weight_may_not_lie_across_a_cut() -> None:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    layers = as_layers([embedding, nn.ReLU(), head])
    layers.check_sharing((0, 0, 0))
    with pytest.raises(PartitionError, match=r"0\.weight is 2\.weight"):
        layers.check_sharing((0, 0, 1))
