"""One direction of an edge between two processes, by torch.distributed's sends and receives.

    first     header number, length of a new header, micro-batch; if all fits into the receiver's
              buffer, also the header and all values
    header    else, if it is new
    values    else, each tensor in one message, into its final memory

The buffer grows with the messages so far, which both ends know.  So a message no larger than an
earlier one is one send and one receive, and arrives while others are computed on.

On an accelerator first and header go by the CPU, and values from device to device.  Once two runs
in a row had the same headers, both ends foresee those of the next run: a receiver then begins to
receive values before it knows the header.  Where a sender has another header, it sends zeros in
the place of what was foreseen, and its own values after them.  Where a graph captures a run, no
first and no header travels: `captured` names the values, which `CapturedChannels` moves.
"""

import struct
import time
from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

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
_UNKNOWN = -1
"""Number of no header."""
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


Described = tuple[int, list[TensorKind]]
"""The number of a message's header, and the tensors that travel on a link."""


class Foreseen:
    """The headers of an edge's messages on an accelerator, as both ends foresee them in a run.

    Foreseen are those of the two last runs with messages, if they were alike.  A message has the
    number of its header, and its tensors as this end has them.
    """

    def __init__(self) -> None:
        self.latest: list[Described] = []
        """The messages of the last run that had some."""
        self._now: list[Described] = []
        self._are_alike = False

    def end_run(self) -> None:
        """Compare the run with the last one; a run without messages changes nothing."""
        if self._now:
            numbers = [[number for number, _ in run] for run in (self.latest, self._now)]
            self._are_alike = numbers[0] == numbers[1]
            self.latest, self._now = self._now, []

    @property
    def next(self) -> Described:
        """The next message; number -1, and no tensors, if it is not foreseen."""
        place = len(self._now)
        is_known = self._are_alike and place < len(self.latest)
        return self.latest[place] if is_known else (_UNKNOWN, [])

    def add(self, number: int, kinds: list[TensorKind]) -> None:
        self._now.append((number, kinds))


class NotForeseen(Exception):
    """A run cannot be captured: a message is not as it was in the last runs of its kind."""


class Received(NamedTuple):
    """A received header and its tensors."""

    header: Header
    tensors: list[Tensor]


class _Rooms(NamedTuple):
    """Tensors under way: their kinds, the memory of each, and torch's receives."""

    kinds: list[TensorKind]
    rooms: list[tuple[Tensor, Tensor]]
    works: list[Any]


_NOTHING = _Rooms([], [], [])
"""No tensors under way."""


class Outgoing:
    """The sending end of `stage`, to process `rank`; a thread of the mesh waits for slow sends.

    `foreseen` has the headers that both ends of the link expect.
    """

    def __init__(self, mesh: Mesh, stage: int, rank: int, channel: int) -> None:
        self._stage, self.rank = stage, rank
        self._headers = HeaderWriter()
        self._later: list[Slot] = []
        self._wires, self._tag = mesh.point_to_point, channel
        self._device = mesh.device
        self._begun: list[_Begun] = []
        self._held_bytes, self._room_bytes = 0, _ROOM_BYTES
        self.foreseen = Foreseen()
        self._sent: list[tuple[ref[Tensor], int]] = []

    def forget_lasting(self) -> None:
        """Begin or end a run: parameters change between runs."""
        self._headers.forget_lasting()
        self.foreseen.end_run()

    def send(self, payload: Payload, microbatch: int) -> None:
        """Begin to send; ConnectionError or PeerError if the connection or a process is gone."""
        number, encoded, tensors, header = self._headers.write(payload)
        values = self._own(tensors, header)
        if self._device.type != "cpu":
            self._begin(bytearray(_FIRST.pack(number, len(encoded), microbatch, False)))
            self._send_from_device(number, encoded, values)
            return
        # 1. Decide whether all of the message fits into the receiver's buffer.
        num_bytes = _FIRST.size + len(encoded) + sum(kind.num_bytes for _, kind in values)
        is_whole = num_bytes <= self._room_bytes
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
                self._begin(to_bytes(tensor, kind), tensor, version_of(tensor))
        # 3. Free memory in a thread that waits for all sends.
        self._later.append(self._wires.later.submit(partial(self._wait, self._begun, None)))
        self._begun, self._held_bytes = [], 0

    def _send_from_device(self, number: int, encoded: bytes, values: Values) -> None:
        """Send a header by the CPU, and values from the device's memory, which nobody keeps."""
        if encoded:
            self._begin(bytearray(encoded))
        foreseen, kinds = self.foreseen.next
        for kind in kinds if foreseen != number else ():  # the receiver has begun to receive these
            zeros = torch.zeros(kind.num_bytes, dtype=torch.uint8, device=self._device)
            self._wires.send_on_device(zeros, self.rank, self._tag)
        for tensor, kind in values:
            content = to_bytes(tensor, kind).to(self._device)
            self._wires.send_on_device(content, self.rank, self._tag)
            self._sent.append((ref(tensor), version_of(tensor)))
        self.foreseen.add(number, [kind for _, kind in values])

    def captured(self, payload: Payload, known: Described) -> list[Tensor]:
        """Return the bytes to send in a captured run; NotForeseen if they need another header."""
        number, _, tensors, header = self._headers.write(payload)
        if number != known[0]:
            raise NotForeseen("a stage sends a tensor of another shape than in the last steps")
        values = self._own(tensors, header)
        self._sent += [(ref(tensor), version_of(tensor)) for tensor, _ in values]
        return [to_bytes(tensor, kind) for tensor, kind in values]

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
        """Wait until all sends from CPU memory have ended.

        A BoundaryError refuses a tensor that was changed in place before its send had ended.
        Empty, TimeoutError: not within `timeout_s`; other errors as of `send`.
        """
        slots, self._later = self._later, []
        for slot in slots:
            slot.get(timeout_s)
        begun, self._begun, self._held_bytes = self._begun, [], 0
        self._wait(begun, time.monotonic() + timeout_s)
        sent, self._sent = self._sent, []
        for reference, version in sent:
            if (tensor := reference()) is not None:
                check_still_as_sent(tensor, version, self._stage)

    def _wait(self, begun: list[_Begun], deadline: float | None) -> None:
        for work, content, watched, version in begun:
            self._wires.wait(work, content, deadline)
            if watched is not None:
                check_still_as_sent(watched, version, self._stage)
        begun.clear()


class Incoming:
    """The receiving end, from process `rank`; any thread may call `bring`, one at a time.

    `expects_much`: the next message may be large, and is better received in a thread.  `foreseen`
    has the headers that both ends of the link expect.
    """

    def __init__(self, mesh: Mesh, rank: int, channel: int) -> None:
        self.rank, self.expects_much = rank, False
        self._headers = HeaderReader()
        self._wires, self._tag, self._device = mesh.point_to_point, channel, mesh.device
        self._bytes = memoryview(bytearray(_ROOM_BYTES))
        self._room = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self._next: Any = None
        self.foreseen, self._early = Foreseen(), _NOTHING

    def forget_lasting(self) -> None:
        """Begin or end a run, as the sender does."""
        self._headers.forget_lasting()
        self.foreseen.end_run()

    def post(self) -> None:
        """Begin to receive the next message, beside computation; `bring` waits for it."""
        if self._next is None:
            self._next = self._wires.receive(self._room, self.rank, self._tag)
            if kinds := self.foreseen.next[1]:
                self._early = self._begun(kinds)

    def receive(self, microbatch: int, timeout_s: float | None = None) -> Payload:
        """Wait for the next message, as `bring`, and return it."""
        return self.payload(self.bring(microbatch, timeout_s))

    def bring(self, microbatch: int, timeout_s: float | None = None) -> Received:
        """Wait for the next message; TimeoutError after `timeout_s`, others as of `send`.

        A PeerError refuses another micro-batch: the processes run different schedules.
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
            room = torch.frombuffer(encoded, dtype=torch.uint8)
            self._wires.wait(self._receive(room), room, deadline)
        header = self._headers.read(number, encoded)
        # 3. The values.
        kinds = self._own(header)
        if self._device.type != "cpu":
            return Received(header, self._received_on_device(number, kinds))
        tensors = (
            self._unpacked(kinds, at) if is_whole else self._ended(self._begun(kinds), deadline)
        )
        # 4. A larger buffer for the next message.
        total = at + sum(kind.num_bytes for kind in kinds)
        self.expects_much = total > _MOST_ROOM_BYTES
        num_bytes = _room_after(len(self._bytes), total)
        if num_bytes > len(self._bytes):
            self._bytes = memoryview(bytearray(num_bytes))
            self._room = torch.frombuffer(self._bytes, dtype=torch.uint8)
        return Received(header, tensors)

    def captured(self, known: Described) -> tuple[list[Tensor], Callable[[], Received]]:
        """Make room for a message in a run that a graph captures, which sends no header.

        Returns:
            The bytes to receive, and a function for the stream that has waited for them.
        """
        number, kinds = known
        header = self._headers.read(number, b"")
        rooms = [room_for(kind, self._device) for kind in kinds]
        begun = _Rooms(kinds, rooms, [None] * len(kinds))
        received = [room for room, _ in rooms if room.numel()]
        return received, lambda: Received(header, self._ended(begun, None))

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

    def _received_on_device(self, number: int, kinds: list[TensorKind]) -> list[Tensor]:
        """Let the current stream wait for the values; begin to receive them if `post` has not."""
        early, self._early = self._early, _NOTHING
        tensors = self._ended(early, None)
        if self.foreseen.next[0] != number:  # what came, if anything, are zeros
            tensors = self._ended(self._begun(kinds), None)
        self.foreseen.add(number, kinds)
        return tensors

    def _begun(self, kinds: list[TensorKind]) -> _Rooms:
        """Begin to receive each tensor in one message."""
        rooms = [room_for(kind, self._device) for kind in kinds]
        works = [self._receive(received) for received, _ in rooms]
        return _Rooms(kinds, rooms, works)

    def _receive(self, room: Tensor) -> Any:
        return self._wires.receive(room, self.rank, self._tag) if room.numel() else None

    def _ended(self, begun: _Rooms, deadline: float | None) -> list[Tensor]:
        tensors = []
        for kind, (received, tensor), work in zip(*begun, strict=True):
            if work is not None:
                self._wires.wait(work, received, deadline)
            tensors.append(fill(tensor, received, kind))
        return tensors
