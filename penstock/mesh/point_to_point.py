"""Point-to-point messages between the processes of one replica, over separate process groups.

One group carries messages up, to higher ranks, and one down: so sends never order receives.  A
wait runs in C++, where Python cannot end it.  After a failure, a process begins one more receive
on each group, whose deadline passes at once.  Gloo then closes all connections of this process in
the group, which ends every wait on them.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.types import LONGEST_TIMEOUT_S

from .background import Background

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


class PointToPoint:
    """Sends and receives of bytes in CPU memory, or in that of this process's device.

    On an accelerator a backend may match sends and receives by their order alone.  So each
    direction of an edge has its own group there, of all processes of the replica.  The thread
    `later` waits for sends that their receivers have not yet taken.
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
        self._of_tag: dict[int, Any] = {}
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

    def open(self, tag: int) -> None:
        """Make the group of one direction of an edge between accelerators.

        All processes call this for all edges, in the same order.
        """
        if self._device.type != "cpu" and tag not in self._of_tag:
            pairs = (pair.split(":") for pair in dist.get_backend_config().split(","))
            backend = dict(pairs)[self._device.type]
            self._of_tag[tag] = self._background.run(lambda: self._made(backend), _WHAT)

    def _made(self, backend: str) -> Any:
        """Make all groups in all processes, and return the group of this one.

        Torch can make a group in its members alone.  But it then names the group by a count that
        differs between stages with unlike meshes.
        """
        limit, mine = timedelta(seconds=self._background.timeout_s), None
        for ranks in self._groups:
            group = dist.new_group(ranks, limit, backend)
            mine = group if self._rank in ranks else mine
        return mine

    def send(self, content: Tensor, rank: int, tag: int) -> Any:
        """Begin to send, without a copy; `wait` for the returned work, and keep it until then.

        Raises:
            ConnectionError: the connection broke.
            PeerError: a process has failed.
        """
        if not content.is_cpu:
            return self._do(lambda: dist.isend(content, rank, self._of_tag[tag]))
        group = self._up if rank > self._rank else self._down
        return self._do(lambda: group.send([content], self._ranks.index(rank), tag))

    def receive(self, room: Tensor, rank: int, tag: int) -> Any:
        """Begin to receive at most the bytes that fit into `room`; otherwise as `send`."""
        if not room.is_cpu:
            return self._do(lambda: dist.irecv(room, rank, self._of_tag[tag]))
        group = self._down if rank > self._rank else self._up
        return self._do(lambda: group.recv([room], self._ranks.index(rank), tag))

    def wait(self, work: Any, content: Tensor, deadline: float | None = None) -> None:
        """Wait for a send or receive of `content`, until `deadline` by `time.monotonic`.

        Any thread may call this.  On an accelerator, only the current stream of this thread waits.

        Raises:
            TimeoutError: it has not ended by then; nothing can be sent or received any more.
            ConnectionError: the connection broke.
            PeerError: a process has failed.
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
        for group in self._of_tag.values():
            with suppress(RuntimeError):
                group.abort()
