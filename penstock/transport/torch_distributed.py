"""One direction of an edge between two processes, by torch.distributed's sends and receives.

    first     which header, its bytes if it is new, the micro-batch; and the header and all values,
              if they fit into the room that the receiver keeps ready
    header    else, if it is new
    values    else, each tensor by itself, into the memory where it will stay

The room grows with what has come, which both ends know.  So a message that is no larger than one
before it is one send and one receive, and comes in while others are computed on.
"""

import struct
import time
from collections.abc import Sequence
from ctypes import memmove
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import MeshError, PeerError
from penstock.mesh import Mesh
from penstock.mesh.background import Slot
from penstock.model.entries import version_of

from .channels import check_still_as_sent
from .headers import Header, HeaderReader, HeaderWriter, Payload, kinds_of
from .wire import TensorKind, fill, memory_of, room_for, to_bytes

_FIRST = struct.Struct("!IIqI")
"""The number of the header, its bytes if it is new, the micro-batch, whether all is here."""
_ROOM_BYTES, _MOST_ROOM_BYTES = 1 << 17, 1 << 22
"""The room at first, and at most: a larger message always goes in parts, which are not copied."""
_MOST_BEGUN, _MOST_HELD_BYTES = 64, 1 << 20
"""After so many sends, or bytes, a thread waits for them and gives back their memory."""


def _room_after(room_bytes: int, num_bytes: int) -> int:
    """Return the room for the next message, after one of `num_bytes`; alike at both ends."""
    if num_bytes > _MOST_ROOM_BYTES:
        return room_bytes
    return max(room_bytes, 1 << (num_bytes - 1).bit_length())


class _Begun(NamedTuple):
    """A send that may not have ended; `watched` may not change before it has."""

    work: Any
    content: Tensor
    watched: Tensor | None
    version: int


Values = list[tuple[Tensor, TensorKind]]


class Came(NamedTuple):
    """What a message brought."""

    header: Header
    tensors: list[Tensor]


class Outgoing:
    """The sending end, of `stage`, to process `rank`; a thread of the mesh awaits what lasts."""

    def __init__(self, mesh: Mesh, stage: int, rank: int, channel: int) -> None:
        self._stage, self.rank = stage, rank
        self._headers = HeaderWriter()
        self._later: list[Slot] = []
        self._wires, self._tag = mesh.point_to_point, channel
        self._device = mesh.device
        self._begun: list[_Begun] = []
        self._held_bytes, self._room_bytes = 0, _ROOM_BYTES

    def forget_lasting(self) -> None:
        """Begin a run, or end one: parameters change between runs."""
        self._headers.forget_lasting()

    def send(self, payload: Payload, microbatch: int) -> None:
        """Begin to send.

        Raises:
            ConnectionError: the connection broke.
            PeerError: a process has failed.
        """
        number, told, tensors, header = self._headers.write(payload)
        values = self._own(tensors, header)
        num_bytes = _FIRST.size + len(told) + sum(kind.num_bytes for _, kind in values)
        on_cpu = self._device.type == "cpu"
        is_whole = num_bytes <= self._room_bytes and on_cpu
        self._room_bytes = _room_after(self._room_bytes, num_bytes)
        if is_whole:
            first = _FIRST.pack(number, len(told), microbatch, True)
            self._send(bytearray().join([first, told, *[memory_of(*v) for v in values]]))
            self._held_bytes += num_bytes
            if len(self._begun) < _MOST_BEGUN and self._held_bytes < _MOST_HELD_BYTES:
                return
        else:
            self._send(bytearray(_FIRST.pack(number, len(told), microbatch, False)))
            if told:
                self._send(bytearray(told))
            for tensor, kind in values:
                self._begin(to_bytes(tensor, kind).to(self._device), tensor, version_of(tensor))
        if not on_cpu:
            self._drop_ended()
            return  # this thread's stream is to wait, once the run is over
        self._later.append(self._wires.later.submit(partial(self._wait, self._begun, None)))
        self._begun, self._held_bytes = [], 0

    def _own(self, tensors: Sequence[Tensor], header: Header) -> Values:
        """Return what of a message goes this way: all of it."""
        values = zip(tensors, kinds_of(header), strict=True)
        return [(tensor, kind) for tensor, kind in values if kind.num_bytes]

    def _send(self, content: bytearray) -> None:
        self._begin(torch.frombuffer(content, dtype=torch.uint8))

    def _begin(self, content: Tensor, watched: Tensor | None = None, version: int = 0) -> None:
        work = self._wires.send(content, self.rank, self._tag)
        self._begun.append(_Begun(work, content, watched, version))

    def _drop_ended(self) -> None:
        """Give back the memory of what has left."""
        while self._begun and self._begun[0].work.is_completed():
            self._wait([self._begun.pop(0)], None)

    def finish(self, timeout_s: float) -> None:
        """Wait until all that was sent has left.

        Raises:
            Empty, TimeoutError: it has not within `timeout_s`.
            ConnectionError: the connection broke.
            PeerError: a process has failed.
        """
        slots, self._later = self._later, []
        for slot in slots:
            slot.get(timeout_s)
        begun, self._begun, self._held_bytes = self._begun, [], 0
        self._wait(begun, time.monotonic() + timeout_s)

    def _wait(self, begun: list[_Begun], deadline: float | None) -> None:
        for work, content, watched, version in begun:
            self._wires.wait(work, content, deadline)
            if watched is not None:
                check_still_as_sent(watched, version, self._stage)
        begun.clear()


class Incoming:
    """The receiving end, from the process `rank`; `bring` is for one thread at a time, any one.

    `expects_much`: the next message had better be received while others are computed on.
    """

    def __init__(self, mesh: Mesh, rank: int, channel: int) -> None:
        self.rank, self.expects_much = rank, False
        self._headers = HeaderReader()
        self._wires, self._tag, self._device = mesh.point_to_point, channel, mesh.device
        self._bytes = memoryview(bytearray(_ROOM_BYTES))
        self._room = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self._next: Any = None

    def forget_lasting(self) -> None:
        """Begin a run, or end one, as the sender does."""
        self._headers.forget_lasting()

    def post(self) -> None:
        """Let the next message come in while others are computed on; `bring` is to follow."""
        if self._next is None:
            self._next = self._begin(self._room)

    def receive(self, microbatch: int, timeout_s: float | None = None) -> Payload:
        """Wait for the next message, as `bring`, and return it."""
        return self.payload(self.bring(microbatch, timeout_s))

    def bring(self, microbatch: int, timeout_s: float | None = None) -> Came:
        """Wait for what the next message brings.

        Raises:
            TimeoutError: it is not there within `timeout_s`.
            PeerError: it is of another micro-batch: the processes run different schedules.
            ConnectionError: the connection broke.
            MeshError: it cannot be read.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.post()
        self._wires.wait(self._next, self._room, deadline)
        self._next = None
        number, size, sent, is_whole = _FIRST.unpack_from(self._bytes)
        self._check(sent, microbatch)
        at = _FIRST.size + size
        told = self._bytes[_FIRST.size : at] if is_whole else self._told(size, deadline)
        header = self._headers.read(number, told)
        kinds = self._own(header)
        tensors = self._unpacked(kinds, at) if is_whole else self._received(kinds, deadline)
        total = at + sum(kind.num_bytes for kind in kinds)
        self.expects_much = total > _MOST_ROOM_BYTES and self._device.type == "cpu"
        self._make_room(_room_after(len(self._bytes), total))
        return Came(header, tensors)

    def payload(self, came: Came) -> Payload:
        """Return the message that came; called in the order of messages."""
        return self._headers.payload(*came)

    def _own(self, header: Header) -> list[TensorKind]:
        """Return what of a message comes this way: all of it."""
        return kinds_of(header)

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > len(self._bytes) and self._device.type == "cpu":
            self._bytes = memoryview(bytearray(num_bytes))
            self._room = torch.frombuffer(self._bytes, dtype=torch.uint8)

    def _check(self, sent: int, microbatch: int) -> None:
        if sent != microbatch:
            raise PeerError(
                f"rank {self.rank} sent micro-batch {sent} where {microbatch} was due: the "
                "processes do not run the same schedule on the same batch"
            )

    def _begin(self, room: Tensor) -> Any:
        return self._wires.receive(room, self.rank, self._tag)

    def _told(self, size: int, deadline: float | None) -> bytearray:
        """Receive a header by itself."""
        told = bytearray(size)
        if told:
            room = torch.frombuffer(told, dtype=torch.uint8)
            self._wires.wait(self._begin(room), room, deadline)
        return told

    def _unpacked(self, kinds: list[TensorKind], at: int) -> list[Tensor]:
        """Copy the tensors that came in the room to where they will stay."""
        total = at + sum(kind.num_bytes for kind in kinds)
        if total > len(self._bytes):
            raise MeshError(
                f"rank {self.rank} sent a message of at most {len(self._bytes):,} bytes that "
                f"describes {total:,}: the connection is damaged, or the versions differ"
            )
        tensors = []
        for kind in kinds:
            received, tensor = room_for(kind, self._device)
            memmove(received.data_ptr(), self._room.data_ptr() + at, kind.num_bytes)
            at += kind.num_bytes
            tensors.append(fill(tensor, received, kind))
        return tensors

    def _received(self, kinds: list[TensorKind], deadline: float | None) -> list[Tensor]:
        """Receive tensors each by itself."""
        rooms = [room_for(kind, self._device) for kind in kinds]
        contents = [received for received, _ in rooms if received.numel()]
        for work, content in [(self._begin(content), content) for content in contents]:
            self._wires.wait(work, content, deadline)
        return [
            fill(tensor, received, k) for (received, tensor), k in zip(rooms, kinds, strict=True)
        ]
