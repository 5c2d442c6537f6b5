"""One direction of an edge between two processes, by torch.distributed's sends and receives.

    first     header number, length of a new header, micro-batch; if all fits into the receiver's
              buffer, also the header and all values
    header    else, if it is new
    values    else, each tensor in one message, into its final memory

The buffer grows with the messages so far, which both ends know.  So a message no larger than an
earlier one is one send and one receive, and arrives while others are computed on.
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
"""Number of the header, its bytes if it is new, micro-batch, and 1 if the message is complete."""
_ROOM_BYTES = 1 << 17
"""Bytes of the buffer at the start."""
_MOST_ROOM_BYTES = 1 << 22
"""Bytes of the largest buffer; a larger message goes in parts, without a copy."""
_MOST_BEGUN = 64
"""Sends after which a thread waits for them and frees their memory."""
_MOST_HELD_BYTES = 1 << 20
"""Bytes of sends after which that thread does so."""


def _room_after(room_bytes: int, num_bytes: int) -> int:
    """Return the buffer's bytes after a message of `num_bytes`; alike at both ends."""
    if num_bytes > _MOST_ROOM_BYTES:
        return room_bytes
    return max(room_bytes, 1 << (num_bytes - 1).bit_length())


class _Begun(NamedTuple):
    """A send that may not have ended; until then `watched` may not change."""

    work: Any
    content: Tensor
    watched: Tensor | None
    version: int


Values = list[tuple[Tensor, TensorKind]]
"""Tensors to send."""


class Received(NamedTuple):
    """A received header and its tensors."""

    header: Header
    tensors: list[Tensor]


class Outgoing:
    """The sending end of `stage`, to process `rank`; a thread of the mesh waits for slow sends."""

    def __init__(self, mesh: Mesh, stage: int, rank: int, channel: int) -> None:
        self._stage, self.rank = stage, rank
        self._headers = HeaderWriter()
        self._later: list[Slot] = []
        self._wires, self._tag = mesh.point_to_point, channel
        self._device = mesh.device
        self._begun: list[_Begun] = []
        self._held_bytes, self._room_bytes = 0, _ROOM_BYTES

    def forget_lasting(self) -> None:
        """Begin or end a run: parameters change between runs."""
        self._headers.forget_lasting()

    def send(self, payload: Payload, microbatch: int) -> None:
        """Begin to send.

        Raises:
            ConnectionError: the connection broke.
            PeerError: a process has failed.
        """
        # 1. Decide whether all of the message fits into the receiver's buffer.
        number, encoded, tensors, header = self._headers.write(payload)
        values = self._own(tensors, header)
        num_bytes = _FIRST.size + len(encoded) + sum(kind.num_bytes for _, kind in values)
        on_cpu = self._device.type == "cpu"
        is_whole = num_bytes <= self._room_bytes and on_cpu
        self._room_bytes = _room_after(self._room_bytes, num_bytes)
        # 2. Begin to send: in one part, or header and tensors apart, without a copy.
        if is_whole:
            first = _FIRST.pack(number, len(encoded), microbatch, True)
            self._begin(bytearray().join([first, encoded, *[memory_of(*v) for v in values]]))
            self._held_bytes += num_bytes
            if len(self._begun) < _MOST_BEGUN and self._held_bytes < _MOST_HELD_BYTES:
                return
        else:
            self._begin(bytearray(_FIRST.pack(number, len(encoded), microbatch, False)))
            if encoded:
                self._begin(bytearray(encoded))
            for tensor, kind in values:
                self._begin(to_bytes(tensor, kind).to(self._device), tensor, version_of(tensor))
        # 3. Free memory: on an accelerator of sends that have ended, since only `finish` may make
        # this thread's stream wait; else in a thread that waits for all of them.
        if not on_cpu:
            while self._begun and self._begun[0].work.is_completed():
                self._wait([self._begun.pop(0)], None)
            return
        self._later.append(self._wires.later.submit(partial(self._wait, self._begun, None)))
        self._begun, self._held_bytes = [], 0

    def _own(self, tensors: Sequence[Tensor], header: Header) -> Values:
        """Return the part of a message for this link: all of it."""
        values = zip(tensors, kinds_of(header), strict=True)
        return [(tensor, kind) for tensor, kind in values if kind.num_bytes]

    def _begin(
        self, content: Tensor | bytearray, watched: Tensor | None = None, version: int = 0
    ) -> None:
        if isinstance(content, bytearray):
            content = torch.frombuffer(content, dtype=torch.uint8)
        work = self._wires.send(content, self.rank, self._tag)
        self._begun.append(_Begun(work, content, watched, version))

    def finish(self, timeout_s: float) -> None:
        """Wait until all sends have ended.

        Raises:
            Empty, TimeoutError: they have not within `timeout_s`.
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
    """The receiving end, from process `rank`; any thread may call `bring`, one at a time.

    `expects_much`: the next message may be large, and is better received in a thread.
    """

    def __init__(self, mesh: Mesh, rank: int, channel: int) -> None:
        self.rank, self.expects_much = rank, False
        self._headers = HeaderReader()
        self._wires, self._tag, self._device = mesh.point_to_point, channel, mesh.device
        self._bytes = memoryview(bytearray(_ROOM_BYTES))
        self._room = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self._next: Any = None

    def forget_lasting(self) -> None:
        """Begin or end a run, as the sender does."""
        self._headers.forget_lasting()

    def post(self) -> None:
        """Begin to receive the next message, beside computation; `bring` waits for it."""
        if self._next is None:
            self._next = self._wires.receive(self._room, self.rank, self._tag)

    def receive(self, microbatch: int, timeout_s: float | None = None) -> Payload:
        """Wait for the next message, as `bring`, and return it."""
        return self.payload(self.bring(microbatch, timeout_s))

    def bring(self, microbatch: int, timeout_s: float | None = None) -> Received:
        """Wait for the next message.

        Raises:
            TimeoutError: it is not there within `timeout_s`.
            PeerError: it is of another micro-batch: the processes run different schedules.
            ConnectionError: the connection broke.
            MeshError: it cannot be read.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # 1. The first part, and with it all of a small message.
        self.post()
        self._wires.wait(self._next, self._room, deadline)
        self._next = None
        number, size, sent, is_whole = _FIRST.unpack_from(self._bytes)
        if sent != microbatch:
            raise PeerError(
                f"rank {self.rank} sent micro-batch {sent} where {microbatch} was due: the "
                "processes do not run the same schedule on the same batch"
            )
        # 2. The header.
        at = _FIRST.size + size
        encoded: memoryview | bytearray = (
            self._bytes[_FIRST.size : at] if is_whole else bytearray(size)
        )
        if encoded and not is_whole:
            self._await([torch.frombuffer(encoded, dtype=torch.uint8)], deadline)
        header = self._headers.read(number, encoded)
        # 3. The values, and a larger buffer for the next message.
        kinds = self._own(header)
        tensors = self._unpacked(kinds, at) if is_whole else self._received(kinds, deadline)
        total = at + sum(kind.num_bytes for kind in kinds)
        on_cpu = self._device.type == "cpu"
        self.expects_much = total > _MOST_ROOM_BYTES and on_cpu
        num_bytes = _room_after(len(self._bytes), total)
        if num_bytes > len(self._bytes) and on_cpu:
            self._bytes = memoryview(bytearray(num_bytes))
            self._room = torch.frombuffer(self._bytes, dtype=torch.uint8)
        return Received(header, tensors)

    def payload(self, came: Received) -> Payload:
        """Return the received message; called in the order of messages."""
        return self._headers.payload(*came)

    def _own(self, header: Header) -> list[TensorKind]:
        """Return the kinds of the part of a message on this link: all of it."""
        return kinds_of(header)

    def _unpacked(self, kinds: list[TensorKind], at: int) -> list[Tensor]:
        """Copy received tensors from the buffer to their final memory."""
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
        """Receive each tensor in one message."""
        rooms = [room_for(kind, self._device) for kind in kinds]
        self._await([received for received, _ in rooms if received.numel()], deadline)
        pairs = zip(rooms, kinds, strict=True)
        return [fill(tensor, received, kind) for (received, tensor), kind in pairs]

    def _await(self, rooms: list[Tensor], deadline: float | None) -> None:
        """Receive into all of `rooms`, and wait."""
        for work, room in [(self._wires.receive(x, self.rank, self._tag), x) for x in rooms]:
            self._wires.wait(work, room, deadline)
