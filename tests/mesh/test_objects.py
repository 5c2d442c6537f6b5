"""What processes tell each other arrives as it was, or is refused where it is."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from penstock.errors import BoundaryError, MeshError
from penstock.mesh.agreement import decode, encode
from penstock.model.pytree import flatten
from penstock.model.templates import from_template, template


class Place(NamedTuple):
    """A named tuple."""

    row: int
    column: str


@dataclass(frozen=True, slots=True)
class Note:
    """A frozen dataclass with slots."""

    text: str
    place: Place


class Holder:
    """Hides a value in an object."""

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    "value",
    [{"a": (1, None, 2j)}, Note("n", Place(1, "b")), OrderedDict(b=1, a=2), torch.Size([2, 0])],
    ids=repr,
)
def test_values_arrive_as_they_were(value: Any) -> None:
    found = decode(encode(value))
    assert found == value and type(found) is type(value)


def test_the_structure_of_a_result_with_named_fields_arrives() -> None:
    _, structure = flatten(torch.ones(2, 2).max(0))
    assert from_template(decode(encode(template(structure)))) == structure


@pytest.mark.parametrize(
    "value", [torch.ones(1), Holder([torch.nn.Parameter(torch.ones(2))])], ids=["bare", "hidden"]
)
def test_a_tensor_is_refused_wherever_it_is(value: Any) -> None:
    with pytest.raises(BoundaryError, match=r"a tensor of shape .* cannot be told"):
        encode([value])


@pytest.mark.parametrize("value", [lambda: 1, defaultdict(lambda: 1), (n for n in "ab")])
def test_what_cannot_be_pickled_is_refused(value: Any) -> None:
    with pytest.raises(BoundaryError, match="cannot be told to another process"):
        encode(value)


def test_a_message_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(MeshError, match="cannot be read"):
        decode(encode(Note("n", Place(1, "b")))[:-5])
