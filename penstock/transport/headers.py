"""Headers: the description of a message, without its values, sent only when it is new.

Both ends number headers alike, so that each travels once; no two ever have the same number.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from penstock.mesh.agreement import decode, encode
from penstock.model.entries import version_of
from penstock.model.pytree import Structure
from penstock.model.templates import from_template, is_plain, template
from penstock.sharding.layouts import Layout

from .channels import Activation, Gradient, Layouts
from .wire import TensorKind

_MOST_KNOWN = 256
"""Headers after which both ends forget all."""
Payload = Activation | Gradient
"""The content of a message."""


class Again(NamedTuple):
    """A reference to the nth lasting tensor, which was sent earlier in this run."""

    number: int


class About(NamedTuple):
    """The fields of an `Activation` but its tensors."""

    wants_grad: tuple[bool, ...]
    structure: Structure
    aliases: frozenset[int]
    lasting: frozenset[int]
    hooked: frozenset[int]

    def __reduce__(self) -> Any:  # a structure itself cannot be pickled
        return _about, (self.wants_grad, template(self.structure), *self[2:])


def _about(wants_grad: tuple[bool, ...], form: Any, *places: frozenset[int]) -> About:
    return About(wants_grad, from_template(form), *places)


class Header(NamedTuple):
    """The description of a message; a gradient has no `about`; () as `layouts` means all whole."""

    kinds: tuple[TensorKind | Again | None, ...]
    about: About | None
    layouts: Layouts = ()


def kinds_of(header: Header) -> list[TensorKind]:
    """Return the kinds of the tensors that travel with a header."""
    return [kind for kind in header.kinds if isinstance(kind, TensorKind)]


def layouts_of(header: Header) -> list[Layout | None]:
    """Return the layouts of these tensors, None for a whole one."""
    layouts = header.layouts or (None,) * len(header.kinds)
    pairs = zip(header.kinds, layouts, strict=True)
    return [layout for kind, layout in pairs if isinstance(kind, TensorKind)]


class HeaderWriter:
    """The sending end of an edge."""

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}
        self._num_forgotten = 0
        self._plain: dict[Header, int] = {}
        self._lasting: dict[tuple[int, TensorKind, int], tuple[Again, Tensor]] = {}

    def forget_lasting(self) -> None:
        """Begin or end a run: parameters change between runs."""
        self._lasting.clear()

    def write(self, payload: Payload) -> tuple[int, bytes, list[Tensor], Header]:
        """Return a header's number, its bytes if it is new, the tensors to send, and itself."""
        leaves = payload.leaves
        kinds: Any = tuple([None if t is None else TensorKind.of(t) for t in leaves])
        about = None
        if isinstance(payload, Activation):
            lasting = payload.lasting
            places = payload.aliases, lasting, payload.hooked
            about = About(payload.wants_grad, payload.structure, *places)
            if lasting:
                kinds = tuple(self._once(p, k, payload) for p, k in enumerate(kinds))
        header = Header(kinds, about, payload.layouts)
        pairs = zip(leaves, kinds, strict=True)
        tensors = [t for t, kind in pairs if t is not None and type(kind) is TensorKind]
        return *self._number(header), tensors, header

    def _once(self, place: int, kind: TensorKind, payload: Activation) -> TensorKind | Again:
        """Return the kind of a tensor, or a reference to a lasting one sent before in this run."""
        if place not in payload.lasting:
            return kind
        tensor = payload.leaves[place]
        key = (tensor.data_ptr(), kind, version_of(tensor))
        if key in self._lasting:
            return self._lasting[key][0]
        # Keep the tensor alive, so that no other takes its address.
        self._lasting[key] = Again(len(self._lasting)), tensor
        return kind

    def _number(self, header: Header) -> tuple[int, bytes]:
        """Return a header's number, and its bytes if it is new to the other side.

        A header with a plain structure is looked up by its value, others by their bytes.
        """
        is_plain_header = header.about is None or is_plain(header.about.structure)
        number = self._plain.get(header) if is_plain_header else None
        if number is not None:
            return number, b""
        encoded, new = encode(header), b""
        if encoded not in self._known:
            if len(self._known) == _MOST_KNOWN:
                self._num_forgotten += _MOST_KNOWN
                self._known.clear()
                self._plain.clear()
            self._known[encoded], new = self._num_forgotten + len(self._known), encoded
        if is_plain_header:
            self._plain[header] = self._known[encoded]
        return self._known[encoded], new


class HeaderReader:
    """The receiving end of an edge."""

    def __init__(self) -> None:
        self._known: list[Header] = []
        self._lasting: list[Tensor] = []

    def forget_lasting(self) -> None:
        """Begin or end a run, as the writer does."""
        self._lasting.clear()

    def read(self, number: int, encoded: bytes | bytearray | memoryview) -> Header:
        """Return the header of a number, from its bytes if it is new; MeshError if unreadable."""
        if encoded:
            if number % _MOST_KNOWN == 0:
                self._known.clear()
            self._known.append(decode(encoded))
        return self._known[number % _MOST_KNOWN]

    def payload(self, header: Header, tensors: Iterable[Tensor]) -> Payload:
        """Build a message from its header and the received tensors."""
        # Leaves are received now, lasting ones of an earlier message, or None.
        new, leaves = iter(tensors), list[Any]()
        lasting = frozenset[int]() if header.about is None else header.about.lasting
        for place, kind in enumerate(header.kinds):
            if kind is None or isinstance(kind, Again):
                leaves.append(None if kind is None else self._lasting[kind.number])
                continue
            leaves.append(next(new))
            if place in lasting:
                self._lasting.append(leaves[-1])
        if header.about is None:
            return Gradient(tuple(leaves), layouts=header.layouts)
        versions = tuple(map(version_of, leaves))
        wants_grad, structure, aliases, lasting, hooked = header.about
        return Activation(
            tuple(leaves),
            wants_grad,
            structure,
            versions,
            aliases,
            lasting=lasting,
            hooked=hooked,
            layouts=header.layouts,
        )
