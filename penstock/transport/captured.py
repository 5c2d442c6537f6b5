"""Channels between processes for a run that a CUDA graph captures.

    program   F0 ── send a ── receive b ── B0 ── send c ── ...
    queue           (a>  b<)               (c>) ...

The messages of a rank run one after another, in the groups of `message_groups`: so no rank waits
for ever when the graph is replayed.  A group begins at its first message.  No headers travel: both
ends know those of the last run of this kind.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.mesh.point_to_point import PointToPoint
from penstock.schedules.ir import Instruction, Message, Schedule, Send
from penstock.schedules.message_groups import communication, message_groups

from .channels import AbstractChannels
from .headers import Payload
from .processes import LatestMessages, ProcessChannels
from .torch_distributed import Described, Incoming, NotForeseen, Outgoing, Received


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
        for group in message_groups(schedule)[rank]:
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
