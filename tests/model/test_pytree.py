"""Values at a boundary: flatten and unflatten give back what went in."""

from collections import OrderedDict, deque, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch

from penstock.errors import BoundaryError
from penstock.model.compare import is_same
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
    assert type(again) is type(value) and str(again) == str(value)


def test_one_tensor_met_twice_stays_one() -> None:
    leaves, structure = flatten((A, {"again": A}, B))
    assert len(leaves) == 2
    first, second, _ = unflatten(structure, leaves)
    assert first is second["again"]


def test_a_frozen_dataclass_is_rebuilt_and_the_original_untouched() -> None:
    value = Frozen(A, 7)
    changed = tree_map(lambda t: t + 1, value)
    assert torch.equal(changed.x, A + 1) and value.x is A


def test_only_objects_of_unknown_kind_are_opaque() -> None:
    class Cache:
        pass

    cache = Cache()
    _, structure = flatten((A, None, 3, "x", torch.float32, {"deep": [cache]}))
    assert list(opaque_values(structure)) == [cache]


class Store(MutableMapping[str, Any]):  # keeps its entries in a dict, which a copy of it shares
    def __init__(self, **entries: Any) -> None:
        self._entries = entries

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Copied(Store):  # says how it is copied
    def __copy__(self) -> "Copied":
        return Copied(**self._entries)


def test_a_mapping_whose_copy_shares_its_entries_is_refused_and_left_as_it_was() -> None:
    store = Store(x=A)
    with pytest.raises(BoundaryError, match=r"of a Store shares .* Give a dict, or .*__copy__"):
        tree_map(lambda t: t + 1, store)
    assert store["x"] is A
    copied = Copied(x=A)
    assert torch.equal(tree_map(lambda t: t + 1, copied)["x"], A + 1) and copied["x"] is A


def test_zero_and_minus_zero_are_not_the_same_number() -> None:
    of = [flatten((A, number))[1] for number in (0.0, -0.0, 0, 1.5, 1.5)]
    same = [is_same(one, other) for one, other in pairwise(of)]
    assert same == [False, False, False, True]
