"""One direction of an edge between two processes on CPUs, over a connection of its own.

    control   which header, its bytes if it is new, the micro-batch
    header    if it is new
    values    the bytes of each tensor, into the memory where it will stay

The thread that computes sends what the kernel takes and reads what the kernel holds, so that a
message needs no other thread to get a core.
"""

import struct
from functools import partial
from typing import Any

from torch import Tensor

from penstock.mesh import Mesh
from penstock.mesh.streams import Inflow
from penstock.model.entries import version_of

from .headers import Payload
from .link import AbstractIncoming, AbstractOutgoing
from .wire import TensorKind, fill, memory_of, memory_to_fill, room_for

_CONTROL = struct.Struct("!IIq")
_LARGE_BYTES = 1 << 20
"""A larger message does not wait in the kernel until it is wanted."""


class Outgoing(AbstractOutgoing):
    """The sending end."""

    def __init__(self, mesh: Mesh, stage: int, rank: int, channel: int) -> None:
        super().__init__(stage, rank)
        self._outflow = mesh.connections.outflow(rank, channel)

    def send(self, payload: Payload, microbatch: int) -> None:
        number, told, values = self._headers.write(payload)
        parts: list[Any] = [_CONTROL.pack(number, len(told), microbatch) + told]
        parts += [memory_of(tensor, kind) for tensor, kind in values if kind.num_bytes]
        rest = self._outflow.write(parts)
        if rest:
            watched = [(tensor, version_of(tensor)) for tensor, _ in values]
            slot = self._outflow.write_later(rest, partial(self._check_as_sent, watched))
            self._later.append(slot)


class Incoming(AbstractIncoming):
    """The receiving end."""

    def __init__(self, mesh: Mesh, rank: int, channel: int) -> None:
        super().__init__(rank)
        self._connections, self._channel, self._device = mesh.connections, channel, mesh.device
        self._inflow: Inflow | None = None

    def _receive(self, microbatch: int, deadline: float | None) -> Payload:
        if self._inflow is None:  # the first message is always received by the main thread
            self._inflow = self._connections.inflow(self._rank, self._channel, deadline)
        control = self._read(_CONTROL.size, deadline)
        number, size, sent = _CONTROL.unpack(control)
        self._check(sent, microbatch, size)
        header = self._headers.read(number, self._read(size, deadline) if size else b"")
        kinds = [kind for kind in header.kinds if isinstance(kind, TensorKind)]
        self.expects_much = sum(kind.num_bytes for kind in kinds) > _LARGE_BYTES
        return self._headers.payload(header, [self._tensor(kind, deadline) for kind in kinds])

    def _read(self, size: int, deadline: float | None) -> bytearray:
        room = bytearray(size)
        self._read_into(room, deadline)
        return room

    def _tensor(self, kind: TensorKind, deadline: float | None) -> Tensor:
        received, tensor = room_for(kind, self._device)
        if kind.num_bytes:
            self._read_into(memory_to_fill(received), deadline)
        return fill(tensor, received, kind)

    def _read_into(self, room: Any, deadline: float | None) -> None:
        assert self._inflow is not None
        self._inflow.read(room, deadline)
