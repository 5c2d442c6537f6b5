"""One direction of an edge between two processes: messages in order, described when they change.

    control   3 numbers: which description, its bytes if it is new, the micro-batch
    header    a new description: kinds of tensors, structure around them, which want a gradient
    values    one message for each tensor

Both ends number the descriptions they have seen alike, so a header travels once for each.
"""

import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PeerError
from penstock.mesh import Mesh
from penstock.mesh.background import Slot
from penstock.runtime.boundary import check_still_as_sent, version_of

from .wire import TensorKind, fill, room_for, to_bytes

_MOST_DESCRIPTIONS = 256
"""Beyond so many, both ends forget all and number anew."""
_CONTROL, _HEADER, _VALUES = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Parcel:
    """What crosses: tensors, None where there is none, and what else the other side must know."""

    tensors: tuple[Tensor | None, ...]
    about: Any


class Outgoing:
    """The sending end."""

    def __init__(self, mesh: Mesh, peer: int, channel: int) -> None:
        self._mesh, self._rank, self._tag = mesh, mesh.rank_of(peer), channel * 4
        self._group = mesh.group("stage")
        self._known: dict[bytes, int] = {}

    def send(self, parcel: Parcel, microbatch: int) -> Slot:
        """Begin to send; keeps the tensors until they are delivered."""
        kinds = [None if t is None else TensorKind.of(t) for t in parcel.tensors]
        description = pickle.dumps((kinds, parcel.about))
        number, header = self._describe(description)
        control = torch.tensor([number, 0 if header is None else header.numel(), microbatch])
        works = [self._isend(control, _CONTROL)]
        buffers = [control]
        if header is not None:
            works.append(self._isend(header, _HEADER))
            buffers.append(header)
        for tensor, kind in zip(parcel.tensors, kinds, strict=True):
            if tensor is not None and kind is not None and kind.num_bytes:
                buffers.append(to_bytes(tensor, kind))
                works.append(self._isend(buffers[-1], _VALUES))
        watched = [(t, version_of(t)) for t in parcel.tensors if t is not None]
        assert self._mesh.background is not None
        return self._mesh.background.sends.submit(lambda: self._finish(works, buffers, watched))

    def _describe(self, description: bytes) -> tuple[int, Tensor | None]:
        if description in self._known:
            return self._known[description], None
        if len(self._known) == _MOST_DESCRIPTIONS:
            self._known.clear()
        number = self._known[description] = len(self._known)
        return number, torch.frombuffer(bytearray(description), dtype=torch.uint8)

    def _isend(self, tensor: Tensor, what: int) -> Any:
        return dist.isend(tensor, self._rank, group=self._group, tag=self._tag + what)

    def _finish(
        self, works: list[Any], buffers: list[Tensor], watched: list[tuple[Tensor, int]]
    ) -> None:
        for work in works:
            work.wait()
        buffers.clear()
        for tensor, version in watched:
            check_still_as_sent(tensor, version, self._mesh.stage)
        watched.clear()


class Incoming:
    """The receiving end; used by one thread."""

    def __init__(self, mesh: Mesh, peer: int, channel: int) -> None:
        self._mesh, self._rank, self._tag = mesh, mesh.rank_of(peer), channel * 4
        self._group = mesh.group("stage")
        self._device = mesh.device or torch.device("cpu")
        self._known: list[Any] = []

    def receive(self, microbatch: int) -> Parcel:
        """Wait for the next message.

        Raises:
            PeerError: it is of another micro-batch: the processes run different schedules.
        """
        control = self._wait_for(torch.empty(3, dtype=torch.int64), _CONTROL)
        number, header_bytes, sent = control.tolist()
        if sent != microbatch:
            raise PeerError(
                f"rank {self._rank} sent micro-batch {sent} where {microbatch} was due: the "
                "processes do not run the same schedule on the same batch"
            )
        if header_bytes:
            if number == 0:
                self._known.clear()
            header = self._wait_for(torch.empty(header_bytes, dtype=torch.uint8), _HEADER)
            self._known.append(pickle.loads(header.numpy().tobytes()))  # written by our own peer
        kinds, about = self._known[number]
        pending: list[Any] = []
        for kind in kinds:
            if kind is None:
                pending.append(None)
                continue
            received, tensor = room_for(kind, self._device)
            work = self._irecv(received, _VALUES) if kind.num_bytes else None
            pending.append((work, received, tensor, kind))
        return Parcel(tuple(_arrived(item) for item in pending), about)

    def _irecv(self, tensor: Tensor, what: int) -> Any:
        return dist.irecv(tensor, self._rank, group=self._group, tag=self._tag + what)

    def _wait_for(self, tensor: Tensor, what: int) -> Tensor:
        self._irecv(tensor, what).wait()
        return tensor


def _arrived(item: Any) -> Tensor | None:
    if item is None:
        return None
    work, received, tensor, kind = item
    if work is not None:
        work.wait()
    return fill(tensor, received, kind)
