"""Encode what processes tell each other as bytes, and decode it without running anything.

    message    magic  bytes of the body  checksum  body
    body       a value
    value      a letter for its kind, then its content; texts, containers and numbers of any size
               say first how long they are

None, booleans, numbers, texts, bytes and containers of them are known to every codec; others only
from its table of `Kind`s.  What is decoded takes memory in proportion to the bytes that came in.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from penstock.errors import BoundaryError, MeshError

MOST_BYTES = 1 << 28
"""A longer message is refused."""
MOST_DEPTH = 64
_MAGIC = b"pnsk"
HEAD = struct.Struct("!4sII")
"""What comes before a body: the magic, the bytes of the body, its checksum."""
_SIZE, _SMALL = struct.Struct("!I"), struct.Struct("!q")
_FLOAT, _COMPLEX = struct.Struct("!d"), struct.Struct("!dd")


@dataclass(frozen=True, slots=True)
class Kind:
    """A class whose values may be told.

    `parts` takes one apart into what can be encoded; `make` makes one of that, and raises whatever
    it likes about parts that do not fit.
    """

    name: str
    type: type
    parts: Callable[[Any], Any]
    make: Callable[[Any], Any]


def record(kind: type) -> Kind:
    """Return the `Kind` of a named tuple or a dataclass, which goes as its fields."""
    match_args: tuple[str, ...] = getattr(kind, "__match_args__", ())  # of a named tuple, all
    names = [f.name for f in fields(kind)] if is_dataclass(kind) else match_args

    def parts(value: Any) -> tuple[Any, ...]:
        return tuple(getattr(value, name) for name in names)

    def make(found: Any) -> Any:
        return kind(**dict(zip(names, found, strict=True)))

    return Kind(kind.__name__, kind, parts, make)


def _constants(kind: type) -> Kind:
    """Return the `Kind` of a class whose values are names in torch."""
    known = {str(value): value for value in vars(torch).values() if type(value) is kind}
    return Kind(kind.__name__, kind, str, known.__getitem__)


_KINDS = (
    *map(_constants, (torch.dtype, torch.layout, torch.memory_format)),
    Kind("device", torch.device, str, torch.device),
    Kind("Size", torch.Size, tuple, torch.Size),
    Kind("Path", type(Path()), str, Path),
)


class Codec:
    """Encodes and decodes plain data, and the classes of a table."""

    def __init__(
        self,
        kinds: Iterable[Kind] = (),
        others: Callable[[type], Kind | None] = lambda _: None,
        find: Callable[[str], type | None] = lambda _: None,
    ) -> None:
        """Know `kinds`; `others` may know more classes, which `find` finds by their name."""
        self._by_type = {kind.type: kind for kind in (*_KINDS, *kinds)}
        self._by_name = {kind.name: kind for kind in self._by_type.values()}
        self._others, self._find = others, find

    def encode(self, value: Any) -> bytes:
        """Return a value as a message.

        Raises:
            BoundaryError: it holds what cannot be told, is nested too deep, or too large.
        """
        body = bytearray()
        self._write(body, value, 0)
        if len(body) > MOST_BYTES:
            raise BoundaryError(
                f"{len(body):,} bytes to tell another process, beside tensors; at most "
                f"{MOST_BYTES:,} can be told at once"
            )
        return HEAD.pack(_MAGIC, len(body), crc32(body)) + body

    def decode(self, message: bytes | bytearray | memoryview) -> Any:
        """Return the value of a message.

        Raises:
            MeshError: it is damaged, or holds what this codec does not know.
        """
        body = memoryview(message)[HEAD.size :]
        if len(message) < HEAD.size or body_bytes(message) != len(body):
            raise _damaged(f"its {len(message)} bytes are not all of it")
        if HEAD.unpack_from(message)[2] != crc32(body):
            raise _damaged("its checksum is another one")
        reader = _Reader(self, body)
        value = reader.value(0)
        if reader.at != len(body):
            raise _damaged(f"{len(body) - reader.at} bytes are left over")
        return value

    def _write(self, out: bytearray, value: Any, depth: int) -> None:
        if depth > MOST_DEPTH:
            raise BoundaryError(
                f"a value is nested more than {MOST_DEPTH} deep, or holds itself; it cannot be "
                "told to another process"
            )
        write = _WRITERS.get(type(value))
        if write is not None:
            write(out, value)
        elif type(value) in _CONTAINERS:
            self._write_all(out, value, depth)
        else:
            kind = self._kind_of(value)
            _write_text(out, b"o", kind.name)
            self._write(out, kind.parts(value), depth + 1)

    def _write_all(self, out: bytearray, value: Any, depth: int) -> None:
        out += _CONTAINERS[type(value)] + _SIZE.pack(len(value))
        if type(value) is dict:
            for key, item in value.items():
                self._write(out, key, depth + 1)
                self._write(out, item, depth + 1)
            return
        for item in value:
            self._write(out, item, depth + 1)

    def _kind_of(self, value: Any) -> Kind:
        kind = self._by_type.get(type(value)) or self._others(type(value))
        if kind is None:
            raise BoundaryError(
                f"a {type(value).__module__}.{type(value).__qualname__} cannot be told to another "
                "process: None, numbers, strings, bytes, and tuples, lists, sets and dicts of "
                "them can, and nothing is unpickled"
            )
        return kind

    def kind_named(self, name: str) -> Kind:
        """Return what is called so in a message.

        Raises:
            MeshError: it is not known here.
        """
        kind = self._by_name.get(name)
        if kind is None and (found := self._find(name)) is not None:
            kind = self._others(found)
        if kind is None:
            raise _damaged(f"it holds a {name[:80]!r}, which is not known here")
        return kind


def body_bytes(head: bytes | bytearray | memoryview) -> int:
    """Return how many bytes come after the head of a message, which is at the start of `head`.

    Raises:
        MeshError: this is no head, or the message would be too long.
    """
    magic, size, _ = HEAD.unpack_from(head)
    if magic != _MAGIC:
        raise _damaged(f"it begins with {magic!r}")
    if size > MOST_BYTES:
        raise _damaged(f"it would be {size:,} bytes long")
    return int(size)


def _damaged(why: str) -> MeshError:
    return MeshError(
        f"a message from another process cannot be read: {why}. See that all processes run the "
        "same version of Penstock, and that nothing else speaks to their ports"
    )


def _write_sized(out: bytearray, letter: bytes, content: bytes) -> None:
    out += letter + _SIZE.pack(len(content)) + content


def _write_text(out: bytearray, letter: bytes, text: str) -> None:
    _write_sized(out, letter, text.encode(errors="surrogatepass"))


def _write_integer(out: bytearray, number: int) -> None:
    size = number.bit_length() // 8 + 1
    if size <= _SMALL.size:
        out += b"i" + _SMALL.pack(number)
    else:
        _write_sized(out, b"I", number.to_bytes(size, signed=True))


_WRITERS: dict[type, Callable[[bytearray, Any], None]] = {
    type(None): lambda out, _: out.extend(b"N"),
    bool: lambda out, value: out.extend(b"T" if value else b"F"),
    int: _write_integer,
    float: lambda out, value: out.extend(b"f" + _FLOAT.pack(value)),
    complex: lambda out, value: out.extend(b"c" + _COMPLEX.pack(value.real, value.imag)),
    str: lambda out, value: _write_text(out, b"s", value),
    bytes: lambda out, value: _write_sized(out, b"b", value),
}
_CONTAINERS: dict[type, bytes] = {
    tuple: b"t",
    list: b"l",
    set: b"S",
    frozenset: b"z",
    dict: b"d",
}


class _Reader:
    """Reads the values of one body, in their order."""

    def __init__(self, codec: Codec, body: memoryview) -> None:
        self._codec, self._body = codec, body
        self.at = 0

    def value(self, depth: int) -> Any:
        if depth > MOST_DEPTH:
            raise _damaged(f"it is nested more than {MOST_DEPTH} deep")
        letter = bytes(self._take(1))
        if letter in _CONSTANTS:
            return _CONSTANTS[letter]
        if letter in _READERS:
            return _READERS[letter](self)
        try:
            return self._compound(letter, depth)
        except MeshError:
            raise
        except Exception as error:  # whatever the parts of a record are, or a key, is refused with
            raise _damaged(f"{type(error).__name__}: {str(error)[:200]}") from error

    def _compound(self, letter: bytes, depth: int) -> Any:
        if letter == b"o":
            kind = self._codec.kind_named(self.text())
            return kind.make(self.value(depth + 1))
        if letter == b"d":
            pairs = self._items(2, depth)
            found = dict(zip(pairs[::2], pairs[1::2], strict=True))
            if 2 * len(found) != len(pairs):
                raise _damaged("a key is there twice")
            return found
        if letter not in _MAKERS:
            raise _damaged(f"{letter!r} is no kind of value")
        return _MAKERS[letter](self._items(1, depth))

    def _items(self, times: int, depth: int) -> list[Any]:
        count = times * self.numbers(_SIZE)[0]
        if count > len(self._body) - self.at:  # each takes a byte at least
            raise _damaged(f"{count:,} values cannot be in what is left of it")
        return [self.value(depth + 1) for _ in range(count)]

    def numbers(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))

    def content(self) -> memoryview:
        return self._take(self.numbers(_SIZE)[0])

    def _take(self, size: int) -> memoryview:
        if size > len(self._body) - self.at:
            raise _damaged(f"it ends before {size:,} bytes that should come")
        self.at += size
        return self._body[self.at - size : self.at]

    def text(self) -> str:
        try:
            return str(self.content(), "utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise _damaged(f"a text in it is no UTF-8: {error}") from error


_CONSTANTS = {b"N": None, b"T": True, b"F": False}
_READERS: dict[bytes, Callable[[_Reader], Any]] = {
    b"i": lambda reader: reader.numbers(_SMALL)[0],
    b"I": lambda reader: int.from_bytes(reader.content(), signed=True),
    b"f": lambda reader: reader.numbers(_FLOAT)[0],
    b"c": lambda reader: complex(*reader.numbers(_COMPLEX)),
    b"s": _Reader.text,
    b"b": lambda reader: bytes(reader.content()),
}
_MAKERS: dict[bytes, Callable[[Sequence[Any]], Any]] = {
    letter: kind for kind, letter in _CONTAINERS.items() if kind is not dict
}

PLAIN = Codec()
"""Knows no classes but paths, and torch's types of numbers, sizes and devices."""
