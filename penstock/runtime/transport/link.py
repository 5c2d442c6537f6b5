"""One direction of an edge between two processes: messages in order, described when they change.

    control   3 numbers: which description, its bytes if it is new, the micro-batch
    header    a new description: kinds of tensors, structure around them, which want a gradient
    values    one message for each tensor

Both ends number the descriptions they have seen alike, so a header travels once for each.  A
micro-batch that was described alike in two runs is guessed to be so in the next, by both ends: the
receiver makes room for its values early, and they arrive without a question.  Where the guess is
wrong, the sender fills that room with zeros first.
"""

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PeerError
from penstock.mesh import Mesh
from penstock.mesh.background import Slot
from penstock.runtime.boundary import check_still_as_sent, version_of

from .wire import TensorKind, fill, room_for, to_bytes

_MOST_DESCRIPTIONS = 256
"""After so many, both ends forget all that they know; numbers go on."""
_CONTROL, _HEADER, _GUESSED, _VALUES = range(4)
"""Tags; values that room was made for early have one of their own, since order counts in each."""
_T = TypeVar("_T")

Kinds = tuple[TensorKind | None, ...]
Room = list[tuple[Any, Tensor, Tensor, TensorKind] | None]
"""Where the values of a message come to: for each tensor the receive, the bytes, the tensor."""


@dataclass(frozen=True, slots=True)
class _Guess:
    """What a micro-batch is expected to be: the number of its description, and its tensors."""

    number: int
    kinds: Kinds


class _History:
    """What messages were, kept alike by both ends."""

    def __init__(self) -> None:
        self.kinds: dict[int, Kinds] = {}
        """Of each description that both ends know, by number."""
        self._seen: dict[int, tuple[int, int]] = {}
        self._guesses: dict[int, _Guess] = {}

    def learn(self, number: int, kinds: Kinds) -> None:
        """Note a new description."""
        if number % _MOST_DESCRIPTIONS == 0:
            self.kinds.clear()
        self.kinds[number] = kinds

    def note(self, microbatch: int, number: int) -> None:
        """Note what a micro-batch turned out to be."""
        _, last = self._seen.get(microbatch, (-1, -2))
        self._seen[microbatch] = (last, number)

    def guess(self, microbatch: int) -> _Guess | None:
        """Say what a micro-batch of this run will be, if that can be guessed."""
        return self._guesses.get(microbatch)

    def end_run(self) -> None:
        """Guess what the next run will be like; both ends have seen the same now."""
        self._guesses = {
            microbatch: _Guess(last, self.kinds[last])
            for microbatch, (before, last) in self._seen.items()
            if before == last and last in self.kinds
        }


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
        self._count = 0
        self._history = _History()

    def send(self, parcel: Parcel, microbatch: int) -> Slot:
        """Begin to send; keeps the tensors until they are delivered."""
        kinds = tuple(None if t is None else TensorKind.of(t) for t in parcel.tensors)
        number, header = self._describe(kinds, parcel.about)
        control = torch.tensor([number, len(header), microbatch])
        buffers = [control]
        works = [self._isend(control, _CONTROL)]
        if header:
            buffers.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            works.append(self._isend(buffers[-1], _HEADER))
        guess = self._history.guess(microbatch)
        is_guessed = guess is not None and guess.number == number
        if guess is not None and not is_guessed:
            for _, kind in _with_values(guess.kinds, guess.kinds):
                buffers.append(torch.zeros(kind.num_bytes, dtype=torch.uint8))
                works.append(self._isend(buffers[-1], _GUESSED))
        for tensor, kind in _with_values(parcel.tensors, kinds):
            buffers.append(to_bytes(tensor, kind))
            works.append(self._isend(buffers[-1], _GUESSED if is_guessed else _VALUES))
        self._history.note(microbatch, number)
        watched = [(t, version_of(t)) for t in parcel.tensors if t is not None]
        assert self._mesh.background is not None
        return self._mesh.background.sends.submit(lambda: self._finish(works, buffers, watched))

    def end_run(self) -> None:
        """Note that all messages of a run are sent."""
        self._history.end_run()

    def _describe(self, kinds: Kinds, about: Any) -> tuple[int, bytes]:
        """Number a description; give it along if the other side does not know it."""
        description = pickle.dumps((kinds, about))
        if description in self._known:
            return self._known[description], b""
        if len(self._known) == _MOST_DESCRIPTIONS:
            self._known.clear()
        number = self._known[description] = self._count
        self._count += 1
        self._history.learn(number, kinds)
        return number, description

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


@dataclass(frozen=True, slots=True)
class Posted:
    """A message that is waited for, with the room that was made for what it is guessed to be."""

    microbatch: int
    control: Tensor
    work: Any
    guess: _Guess | None
    room: Room


class Incoming:
    """The receiving end: messages are posted by one thread, and received by another, in order."""

    def __init__(self, mesh: Mesh, peer: int, channel: int) -> None:
        self._rank, self._tag = mesh.rank_of(peer), channel * 4
        self._group = mesh.group("stage")
        self._device = mesh.device or torch.device("cpu")
        self._abouts: dict[int, Any] = {}
        self._history = _History()

    def post(self, microbatch: int) -> Posted:
        """Begin to wait for the next message."""
        control = torch.empty(3, dtype=torch.int64)
        work = self._irecv(control, _CONTROL)
        guess = self._history.guess(microbatch)
        room = [] if guess is None else self._make_room(guess.kinds, _GUESSED)
        return Posted(microbatch, control, work, guess, room)

    def receive(self, posted: Posted) -> Parcel:
        """Wait until a message is there.

        Raises:
            PeerError: it is of another micro-batch: the processes run different schedules.
        """
        posted.work.wait()
        number, header_bytes, sent = posted.control.tolist()
        if sent != posted.microbatch:
            raise PeerError(
                f"rank {self._rank} sent micro-batch {sent} where {posted.microbatch} was due: "
                "the processes do not run the same schedule on the same batch"
            )
        if header_bytes:
            self._learn(number, header_bytes)
        self._history.note(posted.microbatch, number)
        tensors = [_arrived(item) for item in posted.room]
        if posted.guess is None or posted.guess.number != number:
            room = self._make_room(self._history.kinds[number], _VALUES)
            tensors = [_arrived(item) for item in room]
        return Parcel(tuple(tensors), self._abouts[number])

    def end_run(self) -> None:
        """Note that all messages of a run are received."""
        self._history.end_run()

    def _learn(self, number: int, header_bytes: int) -> None:
        header = torch.empty(header_bytes, dtype=torch.uint8)
        self._irecv(header, _HEADER).wait()
        kinds, about = pickle.loads(header.numpy().tobytes())  # written by our own peer
        self._history.learn(number, kinds)
        self._abouts = {n: a for n, a in self._abouts.items() if n in self._history.kinds}
        self._abouts[number] = about

    def _make_room(self, kinds: Kinds, what: int) -> Room:
        room: Room = []
        for kind in kinds:
            if kind is None:
                room.append(None)
                continue
            received, tensor = room_for(kind, self._device)
            work = self._irecv(received, what) if kind.num_bytes else None
            room.append((work, received, tensor, kind))
        return room

    def _irecv(self, tensor: Tensor, what: int) -> Any:
        return dist.irecv(tensor, self._rank, group=self._group, tag=self._tag + what)


def _with_values(tensors: Iterable[_T | None], kinds: Kinds) -> Iterator[tuple[_T, TensorKind]]:
    """Yield those that have values, which travel, with their kinds."""
    for tensor, kind in zip(tensors, kinds, strict=True):
        if tensor is not None and kind is not None and kind.num_bytes:
            yield tensor, kind


def _arrived(item: tuple[Any, Tensor, Tensor, TensorKind] | None) -> Tensor | None:
    if item is None:
        return None
    work, received, tensor, kind = item
    if work is not None:
        work.wait()
    return fill(tensor, received, kind)
