"""Point-to-point messages between the processes of one replica, over separate process groups.

One group carries messages up, to higher ranks, and one down: so sends never order receives.  A
wait runs in C++, where Python cannot end it.  After a failure, a process begins one more receive
on each group, whose deadline passes at once.  Gloo then closes all connections of this process in
the group, which ends every wait on them.

On an accelerator only streams wait:

    compute   ── F0 ──┬── F1 ── F2 ──┬── B0        a receive: the stream that asks for it waits
    sent      ────────┴ send ─ free  │             a send: a stream of the edge waits, so that its
    from peer ───────────── receive ─┘             memory lives until then, and nobody asks for it
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.types import LONGEST_TIMEOUT_S

from .background import Background
from .collectives import patient, reached

_HELLO = 2**31 - 2
"""Tag of the first message on a connection; tags of later ones are lower."""
_END = 2**31 - 1
"""Tag of the receive that ends all others."""
_MOST_GREETED = 64
"""Group size up to which all pairs connect at the start; in larger ones, at their first use."""
_AT_ONCE = timedelta(milliseconds=1)
"""Deadline of the receive that ends all others."""
_WHAT = "for the others to connect"
"""Completes "rank 1 waited ..."."""


_Sent = tuple[Tensor, int]
"""Memory of a message, and the rank of its peer."""


class _Edge(NamedTuple):
    """A direction of an edge between accelerators, and the stream that waits for its sends."""

    group: Any
    sent: torch.Stream


class PointToPoint:
    """Sends and receives of bytes in CPU memory, or in that of this process's device.

    On an accelerator a backend may match sends and receives by their order alone.  So each
    direction of an edge has its own group there, of all processes of the replica; torch makes a
    communicator for each pair that uses it.  The thread `later` waits for sends from CPU memory
    that their receivers have not yet taken.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        rank: int,
        background: Background,
        device: torch.device,
    ) -> None:
        """Connect the processes of each group; all processes of all groups call this."""
        self._device, self._background = device, background
        self.later = background.new_worker("sends-torch")
        self._of_tag: dict[int, _Edge] = {}
        self._queue: Any = None
        self._rank, self._groups = rank, groups
        self._ranks = ranks = next(group for group in groups if rank in group)
        self._others = [other for other in ranks if other != rank]
        self._error: BaseException | None = None
        self._up, self._down = (
            background.run(lambda: self._made("gloo"), _WHAT) for _ in range(2)
        )
        if len(ranks) <= _MOST_GREETED:
            background.run(self._greet, _WHAT)
        background.watch.wake_on_failure(self)

    def _greet(self) -> None:
        """Exchange a message with each other process: gloo may connect at the first use only.

        A use then waits until the other side uses the same group.  So both sides use the group up
        first.
        """
        nothing = torch.empty(0, dtype=torch.uint8)
        for rank in self._others:
            calls = (self.send, self.receive) if rank > self._rank else (self.receive, self.send)
            for work in [call(nothing, rank, _HELLO) for call in calls]:
                work.wait()

    def open(self, tag: int, links: Iterable[tuple[int, int]]) -> None:
        """Make the group of one direction of an edge between accelerators, and connect it.

        All processes call this for all edges, in the same order.  `links` are the (sender,
        receiver) ranks of this direction; a first message on each makes the communicators, so that
        none is made within a step.
        """
        if self._device.type == "cpu" or tag in self._of_tag:
            return
        group = self._background.run(lambda: self._made(self._backend), _WHAT)
        self._of_tag[tag] = _Edge(group, torch.Stream(self._device))
        for sender, receiver in sorted(links):
            if self._rank == sender:
                self.send_on_device(self._hello(), receiver, tag)
            elif self._rank == receiver:
                self.receive(self._hello(), sender, tag).wait()
        self.join_sends()
        self._background.run(reached(self._device), _WHAT)

    def open_queue(self) -> None:
        """Make the group of `exchange`, and its one communicator; all processes call this.

        The first batch of a group needs all its processes: here each sends to the next one.
        """
        if self._queue is None:
            self._queue = self._background.run(lambda: self._made(self._backend), _WHAT)
            at = self._ranks.index(self._rank)
            after, before = (self._ranks[(at + by) % len(self._ranks)] for by in (1, -1))
            for work in self.exchange([(self._hello(), after)], [(self._hello(), before)]):
                work.wait()
            self._background.run(reached(self._device), _WHAT)

    def exchange(self, sends: Iterable[_Sent], rooms: Iterable[_Sent]) -> list[Any]:
        """Begin several messages of an accelerator, which run together, behind earlier batches.

        `sends` and `rooms` are memory to send or to receive into, and the peer's rank.  Those of
        two ranks are matched by their order.  The caller keeps the memory until all messages have
        ended.

        Returns:
            Works; with `wait`, the current stream waits.
        """
        queue = self._queue
        messages = [dist.P2POp(dist.isend, content, rank, queue) for content, rank in sends]
        messages += [dist.P2POp(dist.irecv, room, rank, queue) for room, rank in rooms]
        works: list[Any] = self._do(lambda: dist.batch_isend_irecv(messages)) if messages else []
        return works

    def _hello(self) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8, device=self._device)

    @property
    def _backend(self) -> str:
        """The name of the accelerator's backend."""
        pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))
        return dict(pairs)[self._device.type]

    def _made(self, backend: str) -> Any:
        """Make all groups in all processes, and return the group of this one.

        Torch can make a group in its members alone.  But it then names the group by a count that
        differs between stages with unlike meshes.
        """
        limit_s, mine = self._background.timeout_s, None
        limit = timedelta(seconds=limit_s) if backend == "gloo" else patient(limit_s)
        for ranks in self._groups:
            group = dist.new_group(ranks, limit, backend)
            mine = group if self._rank in ranks else mine
        return mine

    def send(self, content: Tensor, rank: int, tag: int) -> Any:
        """Begin to send CPU memory, without a copy; `wait` for the returned work, and keep it.

        ConnectionError or PeerError: the connection or a process is gone.
        """
        group = self._up if rank > self._rank else self._down
        return self._do(lambda: group.send([content], self._ranks.index(rank), tag))

    def send_on_device(self, content: Tensor, rank: int, tag: int) -> None:
        """Let an accelerator send after its current stream's work so far; errors as of `send`.

        The memory of `content` is not reused before it is sent, even if nobody keeps it; it may
        not be written to.
        """
        edge = self._of_tag[tag]
        work = self._do(lambda: dist.isend(content, rank, edge.group))
        with edge.sent:
            self._do(work.wait)
        content.record_stream(edge.sent)

    def receive(self, room: Tensor, rank: int, tag: int) -> Any:
        """Begin to receive at most the bytes that fit into `room`; otherwise as `send`."""
        if not room.is_cpu:
            return self._do(lambda: dist.irecv(room, rank, self._of_tag[tag].group))
        group = self._down if rank > self._rank else self._up
        return self._do(lambda: group.recv([room], self._ranks.index(rank), tag))

    def join_sends(self) -> None:
        """Let the accelerator's current stream wait until all messages so far are sent."""
        for edge in self._of_tag.values():
            torch.accelerator.current_stream(self._device).wait_stream(edge.sent)

    def wait(self, work: Any, content: Tensor, deadline: float | None = None) -> None:
        """Wait for a send or receive of `content`, until `deadline` by `time.monotonic`.

        Any thread may call this.  On an accelerator, only the current stream of this thread waits.
        After a TimeoutError nothing can be sent or received any more; other errors as of `send`.
        """
        if not content.is_cpu:
            self._do(work.wait)
            return
        left_s = LONGEST_TIMEOUT_S if deadline is None else max(0.001, deadline - time.monotonic())
        try:
            whole_ms = math.ceil(1e3 * left_s)  # gloo would cut off the rest: too early to be late
            self._do(lambda: work.wait(timedelta(milliseconds=whole_ms)))
        except ConnectionError as error:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError from error
            raise

    def _do(self, job: Callable[[], Any]) -> Any:
        if self._error is not None:
            raise self._error
        try:
            return job()
        except RuntimeError as error:
            if self._error is not None:
                raise self._error from error
            raise ConnectionError(str(error).strip().split("\n")[0]) from error

    def fail(self, error: BaseException) -> None:
        """End all waits, now and later, with `error`; the watch calls this."""
        self._error = error
        for group in (self._up, self._down):
            for other in self._others:  # one broken connection alone would end no wait
                with suppress(RuntimeError):  # its deadline has passed: that closes connections
                    room = torch.empty(1)
                    group.recv([room], self._ranks.index(other), _END).wait(_AT_ONCE)
        groups = [edge.group for edge in self._of_tag.values()]
        for group in [*groups, *([self._queue] if self._queue else [])]:
            with suppress(RuntimeError):
                group.abort()
