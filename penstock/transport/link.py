"""One direction of an edge between two processes: messages in order, described when they change.

    control   3 numbers: which description, its bytes if it is new, the micro-batch
    header    a new description: kinds of tensors, structure around them, which want a gradient
    values    the bytes of each tensor

Both ends number the descriptions they have seen alike, so a header travels once for each.
"""

import pickle
import struct
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import PeerError
from penstock.mesh import Mesh
from penstock.mesh.background import Slot
from penstock.mesh.flows import Inflow
from penstock.model.entries import version_of

from .payload import check_still_as_sent
from .wire import TensorKind, fill, memory_of, memory_to_fill, room_for

_MOST_DESCRIPTIONS = 256
"""Beyond so many, both ends forget all and number anew."""
_CONTROL = struct.Struct("!IIq")
_Kinds = tuple["TensorKind | Again | None", ...]
_LARGE_BYTES = 1 << 20
"""A larger message does not wait in the kernel until it is wanted."""


class Again(NamedTuple):
    """Stands for a tensor that lasts as long as the run, and was sent before: the nth such one."""

    number: int


class Parcel(NamedTuple):
    """What crosses: tensors, None where there is none, and what else the other side must know.

    `is_plain`: an `about` that is equal to this one is the same in every respect.  `lasting` are
    places of tensors that last as long as the run, and need to be sent once in it.
    """

    tensors: tuple[Tensor | None, ...]
    about: Any
    is_plain: bool = False
    lasting: frozenset[int] = frozenset()


class Outgoing:
    """The sending end."""

    def __init__(self, mesh: Mesh, stage: int, rank: int, channel: int) -> None:
        """Send for `stage`, to the process `rank`."""
        self._stage = stage
        self._outflow = mesh.streams.outflow(rank, channel)
        self._known: dict[bytes, int] = {}
        self._plain: dict[Any, int] = {}
        self._lasting: dict[tuple[int, TensorKind, int], tuple[Again, Tensor]] = {}

    def forget_lasting(self) -> None:
        """Begin a run, or end one: parameters change between runs."""
        self._lasting.clear()

    def send(self, parcel: Parcel, microbatch: int) -> Slot | None:
        """Send, or begin to; give the slot of what is still to come, which keeps the tensors."""
        kinds: _Kinds = tuple([None if t is None else TensorKind.of(t) for t in parcel.tensors])
        if parcel.lasting:
            kinds = tuple(self._once(place, kind, parcel) for place, kind in enumerate(kinds))
        number, header = self._describe(kinds, parcel)
        parts: list[Any] = [_CONTROL.pack(number, len(header), microbatch) + header]
        for tensor, kind in zip(parcel.tensors, kinds, strict=True):
            if tensor is not None and isinstance(kind, TensorKind) and kind.num_bytes:
                parts.append(memory_of(tensor, kind))
        rest = self._outflow.write(parts)
        if not rest:
            return None
        watched = [(t, version_of(t)) for t in parcel.tensors if t is not None]
        return self._outflow.write_later(rest, partial(self._check, watched))

    def _once(self, place: int, kind: Any, parcel: Parcel) -> "TensorKind | Again | None":
        """Replace the kind of a lasting tensor that was sent in this run."""
        tensor = parcel.tensors[place]
        if tensor is None or place not in parcel.lasting:
            found: TensorKind | None = kind
            return found
        key = (tensor.data_ptr(), kind, version_of(tensor))
        if key in self._lasting:
            return self._lasting[key][0]
        self._lasting[key] = Again(len(self._lasting)), tensor  # held: its address stays its own
        return TensorKind(*kind)

    def _describe(self, kinds: _Kinds, parcel: Parcel) -> tuple[int, bytes]:
        """Number a description; give it along if the other side does not know it."""
        quick = (kinds, parcel.about, parcel.lasting) if parcel.is_plain else None
        number = self._plain.get(quick)
        if number is not None:
            return number, b""
        description, header = pickle.dumps((kinds, parcel.about, parcel.lasting)), b""
        if description not in self._known:
            if len(self._known) == _MOST_DESCRIPTIONS:
                self._known.clear()
                self._plain.clear()
            self._known[description], header = len(self._known), description
        number = self._known[description]
        if quick is not None:
            self._plain[quick] = number
        return number, header

    def _check(self, watched: list[tuple[Tensor, int]]) -> None:
        for tensor, version in watched:
            check_still_as_sent(tensor, version, self._stage)
        watched.clear()


class Incoming:
    """The receiving end; used by one thread at a time."""

    def __init__(self, mesh: Mesh, rank: int, channel: int) -> None:
        self._streams, self._rank, self._channel = mesh.streams, rank, channel
        self._device = mesh.device
        self._inflow: Inflow | None = None
        self._known: list[Any] = []
        self._lasting: list[Tensor] = []
        self._last_bytes = 0

    @property
    def expects_much(self) -> bool:
        """Whether the next message had better be read while others are computed on."""
        return self._last_bytes > _LARGE_BYTES

    def forget_lasting(self) -> None:
        """Begin a run, or end one, as the sender does."""
        self._lasting.clear()

    def receive(self, microbatch: int, timeout_s: float | None = None) -> Parcel:
        """Wait for the next message.

        Raises:
            TimeoutError: it is not there within `timeout_s`.
            PeerError: it is of another micro-batch: the processes run different schedules.
            ConnectionError: the connection broke.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._inflow is None:  # the first message is always received by the main thread
            self._inflow = self._streams.inflow(self._rank, self._channel, deadline)
        inflow = self._inflow
        number, header_bytes, sent = _CONTROL.unpack(_read(inflow, _CONTROL.size, deadline))
        if sent != microbatch:
            raise PeerError(
                f"rank {self._rank} sent micro-batch {sent} where {microbatch} was due: the "
                "processes do not run the same schedule on the same batch"
            )
        if header_bytes:
            if number == 0:
                self._known.clear()
            header = _read(inflow, header_bytes, deadline)
            self._known.append(pickle.loads(header))  # written by our own peer
        kinds, about, lasting = self._known[number]
        tensors: list[Tensor | None] = []
        for place, kind in enumerate(kinds):
            if isinstance(kind, Again):
                tensors.append(self._lasting[kind.number])
                continue
            new = None if kind is None else _read_tensor(inflow, kind, self._device, deadline)
            tensors.append(new)
            if place in lasting and new is not None:
                self._lasting.append(new)
        self._last_bytes = sum(kind.num_bytes for kind in kinds if isinstance(kind, TensorKind))
        return Parcel(tuple(tensors), about, lasting=lasting)


def _read(inflow: Inflow, size: int, deadline: float | None) -> bytearray:
    room = bytearray(size)
    inflow.read(room, deadline)
    return room


def _read_tensor(
    inflow: Inflow, kind: TensorKind, device: torch.device, deadline: float | None
) -> Tensor:
    received, tensor = room_for(kind, device)
    if kind.num_bytes:
        inflow.read(memory_to_fill(received), deadline)
    return fill(tensor, received, kind)
