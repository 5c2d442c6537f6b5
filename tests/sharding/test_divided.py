"""A part of a product has the sizes of the product that a device runs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.costs.counting.count import record_graph
from penstock.costs.counting.graph import Call, Graph
from penstock.costs.records import Operator
from penstock.model.layer_list import as_layers
from penstock.sharding.divided import divided
from penstock.sharding.layouts import S
from penstock.sharding.letters import Seen
from penstock.sharding.plan import PlannedCall
from penstock.sharding.rules import Choice, choices

_Sizes = dict[str, int]


class _Linear(nn.Module):
    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()
        self.own = nn.Linear(sizes["k"], sizes["n"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.own(x[0])
        return result


class _Scores(nn.Module):
    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()

    def forward(self, pair: Any) -> Tensor:
        result: Tensor = pair[0] @ pair[1]
        return result


class _Attention(nn.Module):
    def __init__(self, sizes: _Sizes) -> None:
        super().__init__()

    def forward(self, x: Any) -> Tensor:
        return F.scaled_dot_product_attention(*x)


_CASES: dict[str, tuple[Callable[[_Sizes], nn.Module], tuple[str, ...], _Sizes]] = {
    "linear": (_Linear, ("btk",), {"b": 4, "t": 6, "k": 8, "n": 24}),
    "matmul": (_Scores, ("bhtc", "bhcs"), {"b": 2, "h": 4, "t": 6, "c": 8, "s": 10}),
    "attention": (_Attention, ("bhtc", "bhsc", "bhsc"), {"b": 2, "h": 4, "t": 6}),
}


def _graph(case: str, sizes: _Sizes) -> Graph:
    make, names, _ = _CASES[case]
    sizes = {"c": 8, "s": 10, **sizes}
    given = [torch.randn([sizes[name] for name in own], requires_grad=True) for own in names]
    return record_graph(as_layers([nn.Identity(), make(sizes)]), tuple(given))


def _products(graph: Graph) -> list[tuple[Call, Operator]]:
    every = ((call, x) for call in graph.of_layer(1) for x in call.operators if x.dims)
    return [(call, x) for call, x in every if x.name in ("gemm", "attention")]


def _cut(graph: Graph, call: Call, length: int) -> PlannedCall:
    """Return a call that is cut along the letter of a length."""

    def lengths(choice: Choice) -> set[int]:
        states = zip((*call.takes, *call.gives), (*choice.takes, *choice.gives), strict=True)
        return {graph.tensors[n].shape[own.dim] for n, own in states if isinstance(own, S)}

    every = choices(Seen.of(graph, call), 2)
    (choice,) = (own for own in every if own.cut and lengths(own) == {length})
    return PlannedCall("", (choice,))


@pytest.mark.parametrize(
    ("case", "cut"),
    [(case, cut) for case, (_, _, sizes) in _CASES.items() for cut in sizes],
)
def test_each_part_is_the_product_of_the_sliced_tensors(case: str, cut: str) -> None:
    sizes = _CASES[case][2]
    graph, sliced = _graph(case, sizes), _graph(case, {**sizes, cut: sizes[cut] // 2})
    found = [
        divided(product, call, _cut(graph, call, sizes[cut]), (2,), graph.tensors)
        for call, product in _products(graph)
    ]
    wanted = [product for _, product in _products(sliced)]
    # a part counts as aligned as the whole; fused attention divides its operands unlike each other
    same: dict[str, Any] = {"alignment": 8} | ({"num_bytes": 0} if case == "attention" else {})
    found, wanted = ([replace(x, **same) for x in own] for own in (found, wanted))
    assert found and sorted(found, key=repr) == sorted(wanted, key=repr)
