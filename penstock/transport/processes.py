"""Processes: values travel by torch.distributed.

main thread    sends, and receives what was not posted
background     receives large messages that were posted early; waits until large ones have left
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from penstock.mesh import Mesh
from penstock.mesh.background import WAIT_FAILURES, Slot
from penstock.mesh.point_to_point import PointToPoint
from penstock.schedules.ir import Instruction, Message, Schedule, sent_message
from penstock.sharding.layouts import as_on

from .channels import AbstractChannels
from .crossing import IncomingShares, outgoing_shares
from .headers import Payload
from .torch_distributed import Incoming, Outgoing

_WHAT_SENDS = "for stage {} to take what was sent to it"


class ProcessChannels(AbstractChannels):
    """The messages of one process; its links to others outlive a run.

    What one of its stages sends to another stays here.  Between stages of several shards messages
    go as `crossing` says.
    """

    def __init__(self, mesh: Mesh, places: Sequence[int]) -> None:
        self._mesh, self._background = mesh, mesh.background
        # All processes of the replica make it here, together.
        self._wires = mesh.point_to_point if mesh.num_stages > 1 else None
        meshes = mesh.placement.meshes
        self._ranks = [meshes[place][mesh.replica] for place in places]
        self._incoming: dict[tuple[int, int], Incoming | IncomingShares] = {}
        self._outgoing: dict[tuple[int, int], list[Outgoing]] = {}
        self._staying: dict[Message, Payload] = {}
        self._posted: dict[Message, Slot] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProcessChannels":
        """Return links of a copied pipeline's own, over the same wires; nothing is under way."""
        other = copy.copy(self)
        other._incoming, other._outgoing, other._staying, other._posted = {}, {}, {}, {}
        return other

    def _stays(self, message: Message) -> bool:
        return self._ranks[message[1]] == self._ranks[message[2]]

    def post(self, message: Message) -> None:
        if self._stays(message):
            return
        if any(message[:3] == posted[:3] for posted in self._posted):
            return  # of one link, at most one message is under way
        incoming = self._incoming_of(message)
        try:
            incoming.post()
        except WAIT_FAILURES:
            return  # who receives it says what for
        if incoming.expects_much:
            job = partial(incoming.bring, message[3])
            self._posted[message] = self._background.receives.submit(job)

    def send(self, message: Message, payload: Payload) -> None:
        if self._stays(message):
            self._staying[message] = payload
            return
        for outgoing in self._outgoing_of(message):
            try:
                outgoing.send(payload, message[3])
            except WAIT_FAILURES as error:
                what = _WHAT_SENDS.format(message[2])
                raise self._background.blame(error, what, outgoing.rank) from error

    def receive(self, message: Message, instruction: Instruction) -> Payload:
        if self._stays(message):
            return self._staying.pop(message)
        is_gradient, source, _, microbatch = message
        posted, timeout_s = self._posted.pop(message, None), self._background.timeout_s
        incoming: Any = self._incoming_of(message)
        try:
            came = (
                incoming.bring(microbatch, timeout_s) if posted is None else posted.get(timeout_s)
            )
        except WAIT_FAILURES as error:
            what = (
                f"at {instruction} for the "
                f"{'gradient' if is_gradient else 'activation'} of micro-batch {microbatch} "
                f"from stage {source}"
            )
            raise self._background.blame(error, what, incoming.rank) from error
        return self._as_held_here(incoming.payload(came))

    def _as_held_here(self, payload: Payload) -> Payload:
        """Return slices in a layout of this mesh, where that of the sender has another shape."""
        if not payload.layouts:
            return payload
        mesh = [axis.size for axis in self._mesh.shard_axes]
        own = (layout and as_on(layout, mesh, self._mesh.shard) for layout in payload.layouts)
        return replace(payload, layouts=tuple(own))

    def _incoming_of(self, message: Message) -> Incoming | IncomingShares:
        key = source, target = message[1:3]
        if key not in self._incoming:
            sending, receiving = sides = self._ranks[source], self._ranks[target]
            self._incoming[key] = (
                Incoming(self._mesh, sending[0], _channel(*key))
                if len(sending) == len(receiving) == 1
                else IncomingShares(self._mesh, source, sides, _channel(*key))
            )
        return self._incoming[key]

    def _outgoing_of(self, message: Message) -> list[Outgoing]:
        key = source, target = message[1:3]
        if key not in self._outgoing:
            sending, receiving = sides = self._ranks[source], self._ranks[target]
            self._outgoing[key] = (
                [Outgoing(self._mesh, source, receiving[0], _channel(*key))]
                if len(sending) == len(receiving) == 1
                else outgoing_shares(self._mesh, source, sides, _channel(*key))
            )
        return self._outgoing[key]

    @contextmanager
    def run(self, schedule: Schedule) -> Iterator[None]:
        """Send what lasts as long as a run does anew inside."""
        self._forget_lasting()
        if self._wires is not None and self._mesh.device.type != "cpu":
            self._open(schedule, self._wires)
        try:
            yield
        finally:
            self._forget_lasting()

    def _open(self, schedule: Schedule, wires: PointToPoint) -> None:
        """Let all processes connect for all edges, in the same order."""
        sent = (sent_message(instruction) for _, instruction in schedule)
        for source, target in sorted({message[1:3] for message in sent if message is not None}):
            if self._ranks[source] != self._ranks[target]:
                wires.open(_channel(source, target))

    def _forget_lasting(self) -> None:
        for incoming in self._incoming.values():
            incoming.forget_lasting()
        for outgoing in chain.from_iterable(self._outgoing.values()):
            outgoing.forget_lasting()

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for (_, target), outgoing in self._outgoing.items():
            for each in outgoing:
                try:
                    each.finish(self._background.timeout_s)
                except WAIT_FAILURES as error:
                    what = _WHAT_SENDS.format(target)
                    raise self._background.blame(error, what, each.rank) from error


def _channel(source: int, target: int) -> int:
    """Number what goes from one stage to another, alike at both ends: activations if `source` is
    the lower one, else gradients.
    """
    return (source << 16) + target
