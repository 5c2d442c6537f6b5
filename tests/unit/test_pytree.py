"""Values at a boundary: flatten and unflatten give back what went in."""

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from penstock.model.pytree import flatten, opaque_values, tree_map, unflatten

Pair = namedtuple("Pair", ("left", "right"))


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    n: int


class Output(OrderedDict[str, Any]):
    """A dictionary with attributes, as model libraries return."""


A, B = torch.zeros(2), torch.ones(3)

VALUES: dict[str, tuple[Any, int]] = {
    "tensor": (A, 1),
    "tuple": ((A, B), 2),
    "list in tuple": (([A], B), 2),
    "dict": ({"a": A, "b": [B, None, 3]}, 2),
    "named tuple": (Pair(A, "text"), 1),
    "dataclass": (Frozen(A, 7), 1),
    "ordered": (Output(a=A, b=(B,)), 2),
    "deque": (deque([A, (B, 3)], maxlen=5), 2),
    "constants": ((None, 3, "x", 2.5), 0),
    "size": (A.shape, 0),
    "empty": ((), 0),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(name: str) -> None:
    value, num_tensors = VALUES[name]
    leaves, structure = flatten(value)
    assert len(leaves) == num_tensors
    again = unflatten(structure, leaves)
    assert type(again) is type(value)
    assert str(again) == str(value)


def test_one_tensor_met_twice_stays_one() -> None:
    leaves, structure = flatten((A, {"again": A}, B))
    assert len(leaves) == 2
    first, second, _ = unflatten(structure, leaves)
    assert first is second["again"]


def test_a_frozen_dataclass_is_rebuilt_and_the_original_untouched() -> None:
    value = Frozen(A, 7)
    changed = tree_map(lambda t: t + 1, value)
    assert torch.equal(changed.x, A + 1)
    assert value.x is A


def test_only_objects_of_unknown_kind_are_opaque() -> None:
    class Cache:
        pass

    cache = Cache()
    _, structure = flatten((A, None, 3, "x", torch.float32, {"deep": [cache]}))
    assert list(opaque_values(structure)) == [cache]
