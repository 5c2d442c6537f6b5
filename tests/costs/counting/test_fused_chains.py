"""Compiled layers move the bytes at the ends of their elementwise chains, and compute as much."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.costs.counting.count import count_layers
from penstock.costs.records import VIEW, AtSize, LayerKind, Part
from penstock.errors import ConfigError
from penstock.model.layer_list import as_layers
from tests.costs.counting.counted import flops, layers_of, operators
from tests.recipes.zoo_members import ZOO_MEMBERS

ROWS, WIDTH = 4, 16
SIZE = ROWS * WIDTH * 4
"""Bytes of a value in a chain."""


class Written(nn.Module):
    """A layer of a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def moved(function: Callable[[Tensor], Tensor], part: Part, *, compile: bool = True) -> int:
    """Return the bytes of all operators but products, in values of a chain."""
    layers = as_layers([Written(function)])
    inputs = torch.empty(ROWS, WIDTH, requires_grad=True)
    counted = count_layers(layers, inputs, compile=compile)
    every = [x for x in operators(counted, part) if x.name not in ("gemm", VIEW)]
    num_bytes = sum(x.num_bytes * x.count for x in every)
    assert num_bytes % SIZE == 0
    return num_bytes // SIZE


def chain(x: Tensor, length: int) -> Tensor:
    for _ in range(length):
        x = x.sigmoid()
    return x


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_chain_of_any_length_moves_the_bytes_of_its_ends(length: int) -> None:
    assert moved(lambda x: chain(x, length), Part.FORWARD) == 2
    assert moved(lambda x: chain(x, length), Part.FORWARD, compile=False) == 2 * length
    one = moved(lambda x: chain(x, 1), Part.INPUT)
    assert moved(lambda x: chain(x, length), Part.INPUT) == one * length - 2 * (length - 1)


@pytest.mark.parametrize(
    ("function", "forward"),
    [
        pytest.param(lambda x: chain(chain(x, 3) @ x.mT @ x, 2), 4, id="a product between"),
        pytest.param(lambda x: F.softmax(chain(x, 2), -1), 2, id="a softmax after"),
        pytest.param(lambda x: chain(F.softmax(x, -1), 2), 2, id="a softmax before"),
        pytest.param(lambda x: chain(chain(x, 2).mT, 2), 2, id="a view between"),
        pytest.param(lambda x: chain(x, 2) * x, 2, id="an end read twice"),
        pytest.param(lambda x: (y := chain(x, 2)) + y @ x.mT @ x, 2 + 3, id="around a product"),
    ],
)
def test_a_chain_reads_what_enters_it_once_and_writes_what_leaves_it(
    function: Callable[[Tensor], Tensor], forward: int
) -> None:
    assert moved(function, Part.FORWARD) == forward


def test_gradients_inside_a_chain_are_neither_written_nor_summed_in_memory() -> None:
    def forked(x: Tensor) -> Tensor:
        y = x.sigmoid()
        return y.tanh() * y.sin()

    # eager: mul 2 x 3, tanh 3, sin 4 (a cosine is made first), a sum 3, sigmoid 3
    eager = moved(forked, Part.INPUT, compile=False)
    assert moved(forked, Part.INPUT) == eager - 2 - 2 - 3 - 1 - 2


@pytest.mark.parametrize("name", ["gpt, untied", "resnet", "gshard_moe, tied"])
def test_compiled_layers_have_equal_flops_and_saved_bytes(name: str) -> None:
    model, inputs = ZOO_MEMBERS[name]()
    layers = layers_of(model, inputs)
    eager, compiled = (count_layers(layers, inputs, compile=x) for x in (False, True))
    for part in Part:
        assert flops(compiled, part) == flops(eager, part)
        assert num_bytes(compiled, part) <= num_bytes(eager, part)
    assert [k.inner_bytes for k in kinds(compiled)] == [k.inner_bytes for k in kinds(eager)]
    assert compiled.saved == eager.saved and compiled.values == eager.values
    assert not any(x.name == VIEW for x in operators(compiled))


def test_a_profile_of_compiled_layers_has_their_kernels_in_layers_and_on_meshes() -> None:
    layers, inputs = [Written(lambda x: chain(x, 3))], torch.empty(ROWS, WIDTH)
    found = penstock.profile(layers, inputs, measure=False, compile=True)
    (operator,) = found.sizes[0].layer(0).operators
    assert operator.num_bytes == 2 * SIZE
    assert found.operators is not None
    calls = found.operators.graph_of(ROWS).calls
    assert [x for call in calls for x in call.operators] == [operator]
    with pytest.raises(ConfigError, match="measure=False"):
        penstock.profile(layers, inputs, compile=True)


def kinds(counted: AtSize) -> list[LayerKind]:
    return [counted.layer(n) for n in range(len(counted.kind_of))]


def num_bytes(counted: AtSize, part: Part) -> int:
    return sum(x.num_bytes * x.count for x in operators(counted, part))
