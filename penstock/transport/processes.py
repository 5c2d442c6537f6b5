"""Processes: values travel by streams.

main thread    sends, and receives what was not posted
background     receives of large messages, that were posted early; the rest of large sends
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from penstock.mesh import Mesh
from penstock.mesh.background import WAIT_FAILURES, Slot
from penstock.model.entries import version_of
from penstock.model.pytree import Structure, from_template, is_plain, template
from penstock.schedules.ir import Instruction, Message

from .channels import AbstractChannels
from .link import Incoming, Outgoing, Parcel
from .payload import Activation, Gradient

_WHAT_SENDS = "for stage {} to take what was sent to it"


class ProcessChannels(AbstractChannels):
    """The messages of one process; its links to others outlive a run.

    What one of its stages sends to another stays here.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int]) -> None:
        self._mesh, self._background = mesh, mesh.background
        self._ranks = [mesh.placement.rank_of(place, mesh.replica) for place in ranks]
        self._incoming: dict[tuple[int, int], Incoming] = {}
        self._outgoing: dict[tuple[int, int], Outgoing] = {}
        self._staying: dict[Message, Activation | Gradient] = {}
        self._posted: dict[Message, Slot] = {}
        self._sent: list[tuple[Slot, int]] = []

    def post(self, message: Message) -> None:
        if self._ranks[message[1]] == self._mesh.rank:
            return
        incoming = self._incoming_of(message)
        if incoming.expects_much:  # of one link, at most one message is under way
            job = partial(incoming.receive, message[3])
            self._posted[message] = self._background.receives.submit(job)

    def send(self, message: Message, payload: Activation | Gradient) -> None:
        _, _, target, microbatch = message
        peer = self._ranks[target]
        if peer == self._mesh.rank:
            self._staying[message] = payload
            return
        try:
            slot = self._outgoing_of(message).send(_pack(payload), microbatch)
        except WAIT_FAILURES as error:
            what = _WHAT_SENDS.format(target)
            raise self._background.blame(error, what, peer) from error
        if slot is not None:
            self._sent.append((slot, target))

    def receive(self, message: Message, instruction: Instruction) -> Activation | Gradient:
        is_gradient, source, _, microbatch = message
        if self._ranks[source] == self._mesh.rank:
            return self._staying.pop(message)
        posted, timeout_s = self._posted.pop(message, None), self._background.timeout_s
        try:
            if posted is None:
                return _unpack(self._incoming_of(message).receive(microbatch, timeout_s))
            return _unpack(posted.get(timeout_s))
        except WAIT_FAILURES as error:
            what = (
                f"at {instruction} for the "
                f"{'gradient' if is_gradient else 'activation'} of micro-batch {microbatch} "
                f"from stage {source}"
            )
            raise self._background.blame(error, what, self._ranks[source]) from error

    def _incoming_of(self, message: Message) -> Incoming:
        _, source, target, _ = message
        key = (source, target)
        if key not in self._incoming:
            rank = self._ranks[source]
            self._incoming[key] = Incoming(self._mesh, rank, _channel(source, target))
        return self._incoming[key]

    def _outgoing_of(self, message: Message) -> Outgoing:
        _, source, target, _ = message
        key = (source, target)
        if key not in self._outgoing:
            rank, channel = self._ranks[target], _channel(source, target)
            self._outgoing[key] = Outgoing(self._mesh, source, rank, channel)
        return self._outgoing[key]

    @contextmanager
    def run(self) -> Iterator[None]:
        """Send what lasts as long as a run does anew inside."""
        self._forget_lasting()
        try:
            yield
        finally:
            self._forget_lasting()

    def _forget_lasting(self) -> None:
        for incoming in self._incoming.values():
            incoming.forget_lasting()
        for outgoing in self._outgoing.values():
            outgoing.forget_lasting()

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        sent, self._sent = self._sent, []
        for slot, target in sent:
            self._background.wait(slot, _WHAT_SENDS.format(target), self._ranks[target])


def _channel(source: int, target: int) -> int:
    """Number what goes from one stage to another, alike at both ends: activations if `source` is
    the lower one, else gradients.
    """
    return (source << 16) + target


class _About(NamedTuple):
    """All of an activation but its tensors."""

    wants_grad: tuple[bool, ...]
    structure: Structure
    aliases: frozenset[int]

    def __reduce__(self) -> tuple[Any, ...]:
        return _about, (self.wants_grad, template(self.structure), self.aliases)


def _about(wants_grad: tuple[bool, ...], form: Any, aliases: frozenset[int]) -> _About:
    return _About(wants_grad, from_template(form), aliases)


def _pack(payload: Activation | Gradient) -> Parcel:
    if isinstance(payload, Gradient):
        return Parcel(payload.leaves, None, is_plain=True)
    about = _About(payload.wants_grad, payload.structure, payload.aliases)
    return Parcel(payload.leaves, about, is_plain(payload.structure), payload.lasting)


def _unpack(parcel: Parcel) -> Activation | Gradient:
    if parcel.about is None:
        return Gradient(parcel.tensors)
    about: _About = parcel.about
    leaves = tuple(tensor for tensor in parcel.tensors if tensor is not None)
    versions = tuple(map(version_of, leaves))
    return Activation(
        leaves, about.wants_grad, about.structure, versions, about.aliases, lasting=parcel.lasting
    )
