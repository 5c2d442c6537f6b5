"""Channels between processes: values travel by torch.distributed.

main thread    sends, and receives messages that were not posted
background     receives large messages that were posted early; waits for large sends

In a run that a CUDA graph captures, the messages of a rank run one after another, in the groups of
`message_groups`: so no rank waits for ever when the graph is replayed.  A group begins at its
first message.  No headers travel: both ends know those of the last run of this kind.

    program   F0 ── send a ── receive b ── B0 ── send c ── ...
    queue           (a>  b<)               (c>) ...
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from penstock.mesh import Mesh
from penstock.mesh.background import WAIT_FAILURES, Slot
from penstock.mesh.point_to_point import PointToPoint
from penstock.schedules.ir import Instruction, Message, Schedule, Send, sent_message
from penstock.schedules.laws import Lanes
from penstock.schedules.laws.one_queue import OneQueue
from penstock.schedules.message_groups import communication, message_groups
from penstock.sharding.layouts import as_on

from .channels import AbstractChannels
from .crossing import IncomingShares, outgoing_shares, shares
from .headers import Payload
from .torch_distributed import Described, Incoming, NotForeseen, Outgoing, Received

_WHAT_SENDS = "for stage {} to take what was sent to it"
"""Completes "rank 1 waited ..."."""


LatestMessages = dict[Incoming | Outgoing, list[Described]]
"""The messages of a run on each link, in order."""


class ProcessChannels(AbstractChannels):
    """The channels of one process; its links to other processes outlive a run.

    A message between stages of the same ranks stays in this process.  Messages between stages of
    several shards are divided by `crossing`.  `wires` carry them; None for one stage.
    """

    def __init__(self, mesh: Mesh, places: Sequence[int], *, captures: bool = False) -> None:
        self._mesh, self._background, self._captures = mesh, mesh.background, captures
        # All processes of the replica make it here, together.
        self.wires = mesh.point_to_point if mesh.num_stages > 1 else None
        meshes = mesh.placement.meshes
        self._ranks = [meshes[place][mesh.replica] for place in places]
        self._incoming: dict[tuple[int, int], Incoming | IncomingShares] = {}
        self._outgoing: dict[tuple[int, int], list[Outgoing]] = {}
        self._staying: dict[Message, Payload] = {}
        self._posted: dict[Message, Slot] = {}
        self._opened: Schedule | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "ProcessChannels":
        """Return new links over the same connections; no message is under way."""
        other = copy.copy(self)
        other._incoming, other._outgoing, other._staying, other._posted = {}, {}, {}, {}
        return other

    def stays(self, message: Message) -> bool:
        """Tell whether a message is between stages of this process."""
        return self._ranks[message[1]] == self._ranks[message[2]]

    def incoming_of(self, message: Message) -> Incoming | IncomingShares:
        """Return the receiving end of a message's edge, made at its first use."""
        key = source, target = message[1:3]
        if key not in self._incoming:
            sides, channel = (self._ranks[source], self._ranks[target]), _channel(*key)
            self._incoming[key] = (
                Incoming(self._mesh, sides[0][0], channel)
                if len(sides[0]) == len(sides[1]) == 1
                else IncomingShares(self._mesh, source, sides, channel)
            )
        return self._incoming[key]

    def outgoing_of(self, message: Message) -> list[Outgoing]:
        """Return the sending ends of a message's edge, made at their first use."""
        key = source, target = message[1:3]
        if key not in self._outgoing:
            sides, channel = (self._ranks[source], self._ranks[target]), _channel(*key)
            self._outgoing[key] = (
                [Outgoing(self._mesh, source, sides[1][0], channel)]
                if len(sides[0]) == len(sides[1]) == 1
                else outgoing_shares(self._mesh, source, sides, channel)
            )
        return self._outgoing[key]

    def post(self, message: Message) -> None:
        if self.stays(message):
            return
        if any(message[:3] == posted[:3] for posted in self._posted):
            return  # a link has at most one message under way
        incoming = self.incoming_of(message)
        try:
            incoming.post()
        except WAIT_FAILURES:
            return  # `receive` fails too, and says in which instruction
        if incoming.expects_much:
            job = partial(incoming.bring, message[3])
            self._posted[message] = self._background.receives.submit(job)

    def send(self, message: Message, payload: Payload) -> None:
        if self.stays(message):
            self._staying[message] = payload
            return
        for outgoing in self.outgoing_of(message):
            try:
                outgoing.send(payload, message[3])
            except WAIT_FAILURES as error:
                purpose = _WHAT_SENDS.format(message[2])
                raise self._background.blame(error, purpose, outgoing.rank) from error

    def receive(self, message: Message, instruction: Instruction) -> Payload:
        if self.stays(message):
            return self._staying.pop(message)
        is_gradient, source, _, microbatch = message
        posted, timeout_s = self._posted.pop(message, None), self._background.timeout_s
        incoming: Any = self.incoming_of(message)
        try:
            came = (
                incoming.bring(microbatch, timeout_s) if posted is None else posted.get(timeout_s)
            )
        except WAIT_FAILURES as error:
            purpose = (
                f"at {instruction} for the "
                f"{'gradient' if is_gradient else 'activation'} of micro-batch {microbatch} "
                f"from stage {source}"
            )
            raise self._background.blame(error, purpose, incoming.rank) from error
        payload: Payload = incoming.payload(came)
        if not payload.layouts:
            return payload
        # The sender's mesh may have another shape: express slices in layouts of this one.
        mesh = [axis.size for axis in self._mesh.shard_axes]
        layouts = (layout and as_on(layout, mesh, self._mesh.shard) for layout in payload.layouts)
        return replace(payload, layouts=tuple(layouts))

    @contextmanager
    def run(self, schedule: Schedule) -> Iterator[None]:
        """Begin and end a run: inside, lasting tensors are sent once more."""
        self._forget_lasting()
        if schedule is not self._opened:
            self._open(schedule)
        try:
            yield
        finally:
            self._forget_lasting()

    def _open(self, schedule: Schedule) -> None:
        """Connect accelerators along all edges of a schedule; all processes do so in one order."""
        self._opened = schedule
        if self.wires is None or self._mesh.device.type == "cpu":
            return
        sent = (sent_message(instruction) for _, instruction in schedule)
        for source, target in sorted({message[1:3] for message in sent if message}):
            sides = self._ranks[source], self._ranks[target]
            if sides[0] != sides[1]:
                self.wires.open(_channel(source, target), shares(sides))
        if self._captures:
            self.wires.open_queue()

    def latest(self) -> LatestMessages:
        """Describe the messages of the latest run; links between several shards are left out."""
        links = (*self._incoming.values(), *chain.from_iterable(self._outgoing.values()))
        whole = (link for link in links if isinstance(link, Incoming | Outgoing))
        return {link: link.foreseen.latest for link in whole}

    def forget_links(self) -> None:
        """Describe all messages anew from now on; all processes do so between two runs."""
        self._incoming, self._outgoing = {}, {}

    def _forget_lasting(self) -> None:
        for incoming in self._incoming.values():
            incoming.forget_lasting()
        for outgoing in chain.from_iterable(self._outgoing.values()):
            outgoing.forget_lasting()

    def finish(self) -> None:
        """Wait until all sends have ended."""
        for (_, target), links in self._outgoing.items():
            for link in links:
                try:
                    link.finish(self._background.timeout_s)
                except WAIT_FAILURES as error:
                    purpose = _WHAT_SENDS.format(target)
                    raise self._background.blame(error, purpose, link.rank) from error


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """A group that has begun, as the `number`th, from a stream; `sent` is what it sends."""

    number: int
    stream: Any
    works: list[Any]
    sent: list[Tensor]

    def wait(self) -> None:
        """Let the current stream wait for all messages of the group."""
        for work in self.works:
            work.wait()


class CapturedChannels(AbstractChannels):
    """The channels of one captured run, over the links of a process.

    Holds what a group sends until the stream that made it has waited for this or a later group.
    """

    def __init__(
        self,
        links: ProcessChannels,
        wires: PointToPoint,
        schedule: Schedule,
        rank: int,
        latest: LatestMessages,
    ) -> None:
        self._links, self._wires = links, wires
        self._known = {link: iter(messages) for link, messages in latest.items()}
        self._messages_with: dict[Message, list[Any]] = {}
        groups = message_groups(schedule)
        OneQueue(groups)(Lanes(schedule, ()))  # the proof that no replay hangs
        for group in groups[rank]:
            messages = [communication(schedule.programs[rank], position) for position in group]
            self._messages_with |= {each.message: messages for each in messages}
        self._coming: dict[Message, tuple[_Group, Callable[[], Received]]] = {}
        self._held: list[_Group] = []
        self._num_begun = 0

    def send(self, message: Message, payload: Payload) -> None:
        if self._links.stays(message):
            self._links.send(message, payload)
        else:
            self._begin(message, payload)

    def receive(self, message: Message, instruction: Instruction) -> Payload:
        if self._links.stays(message):
            return self._links.receive(message, instruction)
        if message not in self._coming:
            self._begin(message, None)
        group, came = self._coming.pop(message)
        group.wait()
        stream = torch.cuda.current_stream()
        ended = [g for g in self._held if g.stream == stream and g.number <= group.number]
        self._release(ended)
        received = came()
        if stream != group.stream:  # the message ran early, and has memory of another stage
            for tensor in received.tensors:
                tensor.record_stream(stream)
        incoming: Any = self._links.incoming_of(message)
        payload: Payload = incoming.payload(received)
        return payload

    def _begin(self, message: Message, payload: Payload | None) -> None:
        """Begin the group of a message; `payload` is what it sends."""
        sends, rooms, coming = list[tuple[Tensor, int]](), list[tuple[Tensor, int]](), {}
        for each in self._messages_with[message]:
            if isinstance(each, Send):
                assert payload is not None, "a group begins with its send"
                (outgoing,) = self._links.outgoing_of(each.message)
                contents = outgoing.captured(payload, self._next(outgoing))
                sends += [(content, outgoing.rank) for content in contents]
            else:
                incoming: Any = self._links.incoming_of(each.message)
                known = self._next(incoming)
                received, coming[each.message] = incoming.captured(known)
                rooms += [(room, incoming.rank) for room in received]
        works = self._wires.exchange(sends, rooms)
        group = _Group(self._num_begun, torch.cuda.current_stream(), works, [c for c, _ in sends])
        self._num_begun += 1
        self._held.append(group)
        self._coming |= {each: (group, came) for each, came in coming.items()}

    def _next(self, link: Incoming | Outgoing) -> Described:
        known = next(self._known.get(link, iter(())), None)
        if known is None:
            raise NotForeseen("the stages exchange more messages than in the last steps")
        return known

    def _release(self, groups: list[_Group]) -> None:
        """Free what groups have sent, in a stream that comes after them."""
        for group in groups:
            group.wait()  # torch holds what it sends until then
            self._held.remove(group)

    def finish(self) -> None:
        """Let the current stream wait for all messages."""
        self._release(list(self._held))
        self._links.finish()


def _channel(source: int, target: int) -> int:
    """Return the number of a direction of an edge, the same at both ends."""
    return (source << 16) + target
