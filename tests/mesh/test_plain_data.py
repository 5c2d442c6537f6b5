"""What processes tell each other arrives as it was, and nothing broken gets through."""

import random
import struct
import tracemalloc
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, IntFlag
from fractions import Fraction
from typing import Any, NamedTuple
from zlib import crc32

import numpy
import pytest
import torch
from torch import Tensor

from penstock.errors import BoundaryError, MeshError
from penstock.mesh.plain_data import HEAD, MOST_BYTES, MOST_DEPTH, PLAIN, Codec, record
from penstock.mesh.user_classes import class_name, tensor_class, user_codec
from tests.model_parts import Doubled


class Place(NamedTuple):
    """A named tuple."""

    row: int
    column: str


@dataclass(frozen=True, slots=True)
class Note:
    """A frozen dataclass with slots."""

    text: str
    place: Place


@dataclass
class Open(OrderedDict[str, Any]):
    """A dict that is a dataclass too, as some outputs of models are."""

    left: Any = None

    def __post_init__(self) -> None:
        raise AssertionError("nothing of a class is called")


class Colour(Enum):
    """An enum."""

    RED = "r"


class Right(IntFlag):
    """Flags, of which a value may hold several or none."""

    READ = 1
    WRITE = 2


class Name(str):
    """A text of a class of its own."""


class Level(int):
    """A whole number likewise."""


class Table(dict[str, int]):
    """A dict with an attribute, whose constructor wants something."""

    def __init__(self, name: str) -> None:
        self.name = name


class Closing:
    """Would do something when it goes."""

    def __del__(self) -> None: ...


@dataclass
class ClosingNote(Closing):
    """Likewise."""

    file: str = "a file"


PLAIN_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**200), 0.1, float("inf"), 2j),
    *("", "größe", "\udcff", b"", b"\0x", (), (1, (2,)), [[]], {1, 2}, frozenset((3, 4))),
    {"a": 1, (1, None): {}},
    *(torch.float32, torch.Size([2, 0]), torch.device("cpu"), torch.device("cuda", 1)),
    *(torch.strided, torch.channels_last),
)
WITH_CLASSES = user_codec()
OTHER_VALUES: tuple[Any, ...] = (
    *(slice(1, None, 2), range(3), ..., Fraction(1, 3), Decimal("0.1"), numpy.float32(0.1)),
    *(Place(1, "b"), Note("n", Place(0, "")), Colour.RED, deque([1, 2], 3), OrderedDict(b=1, a=2)),
    {"nested": [Note("deep", Place(2, "c"))]},
    *(Right.READ, Right.READ | Right.WRITE, Right(0), Name("n"), Level(2**70)),
    *(defaultdict(list, a=[1]), defaultdict(None, a=1)),
)
SPOKEN = [
    PLAIN.encode([(f"layer.{n}", (n, 4), torch.float32, {"a": None, "b": [1.5] * n})])
    for n in range(20)
] + [WITH_CLASSES.encode(value) for value in OTHER_VALUES]


def framed(body: bytes) -> bytes:
    """Return a message whose head is right, whatever its body is."""
    return HEAD.pack(b"pnsk", len(body), crc32(body)) + body


@pytest.mark.parametrize("value", PLAIN_VALUES, ids=repr)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    found = PLAIN.decode(PLAIN.encode(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", OTHER_VALUES, ids=repr)
def test_values_of_the_users_classes_arrive_as_they_were(value: Any) -> None:
    found = WITH_CLASSES.decode(WITH_CLASSES.encode(value))
    assert found == value
    assert type(found) is type(value)
    for name in ("maxlen", "default_factory"):
        assert getattr(found, name, None) == getattr(value, name, None)


def test_a_default_that_could_not_be_made_elsewhere_is_refused() -> None:
    with pytest.raises(BoundaryError, match=r"a defaultdict of .*lambda.* give dict"):
        WITH_CLASSES.encode(defaultdict(lambda: 1, a=2))


def test_arrays_arrive_as_they_were_and_may_be_written() -> None:
    array = numpy.arange(6, dtype=numpy.int16).reshape(2, 3)[:, ::2]
    found = WITH_CLASSES.decode(WITH_CLASSES.encode(array))
    found += 1
    assert numpy.array_equal(found, array + 1)
    assert found.dtype == array.dtype


def test_nothing_of_a_class_is_called_when_its_value_arrives() -> None:
    table = Table("t")
    table["one"] = 1
    output = Open.__new__(Open)
    output.left = output["left"] = 5
    one, other = WITH_CLASSES.decode(WITH_CLASSES.encode((table, output)))
    assert (one, one.name) == ({"one": 1}, "t")
    assert (other.left, list(other.items())) == (5, [("left", 5)])


def test_a_results_named_fields_arrive() -> None:
    found = torch.ones(2, 2).max(0)
    told = type(found)([1, 2])  # type: ignore[arg-type]
    assert WITH_CLASSES.decode(WITH_CLASSES.encode(told)).indices == 2


def local_class() -> type:
    @dataclass
    class Local:
        text: str = ""

    return Local


@pytest.mark.parametrize(
    "value",
    [object(), local_class()(), ClosingNote(), len, torch.ones(1), numpy.array([None]), Closing()],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_made_again_safely_is_refused_where_it_is(value: Any) -> None:
    with pytest.raises(BoundaryError, match="cannot be told to another process"):
        WITH_CLASSES.encode([value])


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(BoundaryError, match="holds itself"):
        PLAIN.encode(value)


def test_a_class_of_the_table_is_known_by_its_name_only_to_that_codec() -> None:
    codec = Codec([record(Place)])
    assert codec.decode(codec.encode(Place(3, "x"))) == Place(3, "x")
    with pytest.raises(MeshError, match="'Place', which is not known here"):
        PLAIN.decode(codec.encode(Place(3, "x")))


@pytest.mark.parametrize(
    "name",
    ["os:system", "subprocess:Popen", "nowhere:Note", "penstock.nothing:x", ":", "builtins:int"],
)
def test_a_message_makes_nothing_but_data_of_classes_that_are_here(name: str) -> None:
    content = name.encode()
    body = b"o" + struct.pack("!I", len(content)) + content + b"t\0\0\0\2Nd\0\0\0\0"
    with pytest.raises(MeshError, match="not known here"):
        WITH_CLASSES.decode(framed(body))


def test_classes_of_tensors_are_told_by_name() -> None:
    assert tensor_class(class_name(Doubled)) is Doubled
    assert tensor_class(class_name(Tensor)) is Tensor
    for name in ("torch:Size", "os:system", "x"):
        with pytest.raises(ValueError, match="no class of tensors"):
            tensor_class(name)


# -- broken messages ------------------------------------------------------------------------------


def cut(message: bytes, draw: random.Random) -> bytes:
    return message[: draw.randrange(len(message))]


def flipped(message: bytes, draw: random.Random) -> bytes:
    broken = bytearray(message)
    for place in draw.sample(range(len(broken)), min(len(broken), draw.randint(1, 4))):
        broken[place] ^= 1 << draw.randrange(8)
    return bytes(broken)


def stretched(message: bytes, draw: random.Random) -> bytes:
    return message + draw.randbytes(draw.randint(1, 40))


def drawn(_: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(80))


BREAKS: tuple[Callable[[bytes, random.Random], bytes], ...] = (cut, flipped, stretched, drawn)


def test_ten_thousand_broken_messages_are_an_error_each_and_take_little_memory() -> None:
    draw = random.Random(0)
    tracemalloc.start()
    try:
        for _ in range(10_000):
            message = draw.choice(SPOKEN)
            broken = draw.choice(BREAKS)(message, draw)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(MeshError):
                WITH_CLASSES.decode(broken)
            assert tracemalloc.get_traced_memory()[1] - before < 64 * len(broken) + (1 << 20)
    finally:
        tracemalloc.stop()


def test_broken_bodies_under_a_right_head_are_an_error_or_plain_data() -> None:
    draw = random.Random(1)
    errors = 0
    tracemalloc.start()
    try:
        for _ in range(10_000):
            body = draw.choice(BREAKS)(draw.choice(SPOKEN)[HEAD.size :], draw)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                WITH_CLASSES.decode(framed(body))
            except MeshError:
                errors += 1
            assert tracemalloc.get_traced_memory()[1] - before < 64 * len(body) + (1 << 20)
    finally:
        tracemalloc.stop()
    assert errors > 7_000


@pytest.mark.parametrize(
    "body, why",
    [
        (b"l\xff\xff\xff\xff", "4,294,967,295 values cannot be"),
        (b"b\xff\xff\xff\xff", "ends before 4,294,967,295 bytes"),
        (b"d\0\0\0\2i" + bytes(8) + b"Ni" + bytes(8) + b"N", "a key is there twice"),
        (b"d\0\0\0\1l\0\0\0\0N", "unhashable"),
        (b"l\0\0\0\1" * (MOST_DEPTH + 1) + b"N", "nested more than"),
        (b"s\0\0\0\1\xff", "no UTF-8"),
        (b"o\0\0\0\5dtypes\0\0\0\1x", "KeyError"),
        (b"?", "no kind of value"),
        (b"NN", "1 bytes are left over"),
    ],
)
def test_the_error_says_what_is_wrong_with_a_message(body: bytes, why: str) -> None:
    with pytest.raises(MeshError, match=why):
        PLAIN.decode(framed(body))


def test_a_message_that_says_it_is_too_long_is_refused_by_its_head() -> None:
    with pytest.raises(MeshError, match="bytes long"):
        PLAIN.decode(HEAD.pack(b"pnsk", MOST_BYTES + 1, 0))
