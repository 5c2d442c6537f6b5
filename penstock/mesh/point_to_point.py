"""Point-to-point messages between the processes of one replica, over process groups of their own.

One group for each direction, up to higher ranks and down to lower ones, so that what is sent never
orders what is received.  A wait runs in C++, where nothing of Python ends it.  When a process
fails, what ends it is one more wait on the same group that outlives its deadline: gloo then closes
all connections of this process in the group.
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
from .start import own_backend

_HELLO, _END = 2**31 - 2, 2**31 - 1
"""Tags; those of messages are lower."""
_MOST_GREETED = 64
"""Among more, gloo connects those that talk to each other when they do, if it is told to."""
_AT_ONCE = timedelta(milliseconds=1)
_WHAT = "for the others to connect"


class PointToPoint:
    """Sends and receives bytes that lie in the memory of the CPU, or of this process's device.

    On an accelerator a backend may pair sends and receives by their order alone, so that each
    direction of an edge has a group of its own there, of all processes of the replica.  The thread
    `later` waits for what others have not yet taken.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        rank: int,
        background: Background,
        device: torch.device,
    ) -> None:
        """Connect the processes of each group with each other; those of all groups call this."""
        self._device, self._background = device, background
        self.later = background.new_worker("sends-torch")
        self._of_tag: dict[int, Any] = {}
        self._rank, self._groups = rank, groups
        self._ranks = ranks = next(own for own in groups if rank in own)
        self._others = [other for other in ranks if other != rank]
        self._error: BaseException | None = None
        self._up, self._down = (
            background.run(lambda: self._made("gloo"), _WHAT) for _ in range(2)
        )
        if len(ranks) <= _MOST_GREETED:
            background.run(self._greet, _WHAT)
        background.watch.wake_on_failure(self)

    def _greet(self) -> None:
        """Exchange a message with each other one: gloo may connect at the first use only.

        A use then waits until the other side uses the same group, so both take the way up first.
        """
        nothing = torch.empty(0, dtype=torch.uint8)
        for rank in self._others:
            ways = (self.send, self.receive) if rank > self._rank else (self.receive, self.send)
            for work in [way(nothing, rank, _HELLO) for way in ways]:
                work.wait()

    def open(self, tag: int) -> None:
        """Make what tensors on an accelerator travel by along one direction of an edge; all
        processes call this for all edges in the same order.
        """
        if self._device.type != "cpu" and tag not in self._of_tag:
            backend = own_backend(dist.get_backend_config(), self._device)
            self._of_tag[tag] = self._background.run(lambda: self._made(backend), _WHAT)

    def _made(self, backend: str) -> Any:
        """Make all groups in all processes, and return the own one.

        Torch can make a group in its members alone, but names it by how many groups each of them
        has: those of stages with unlike meshes have not as many.
        """
        limit, own = timedelta(seconds=self._background.timeout_s), None
        for ranks in self._groups:
            made = dist.new_group(ranks, limit, backend)
            own = made if self._rank in ranks else own
        return own

    def send(self, content: Tensor, rank: int, tag: int) -> Any:
        """Begin to send; nothing is copied.  The work is to be kept until it was waited for.

        Raises:
            ConnectionError: the connection broke.
            PeerError: a process has failed.
        """
        if not content.is_cpu:
            return self._do(lambda: dist.isend(content, rank, self._of_tag[tag]))
        group = self._up if rank > self._rank else self._down
        return self._do(lambda: group.send([content], self._ranks.index(rank), tag))

    def receive(self, room: Tensor, rank: int, tag: int) -> Any:
        """Begin to receive at most as many bytes as there is room for; otherwise as `send`."""
        if not room.is_cpu:
            return self._do(lambda: dist.irecv(room, rank, self._of_tag[tag]))
        group = self._down if rank > self._rank else self._up
        return self._do(lambda: group.recv([room], self._ranks.index(rank), tag))

    def wait(self, work: Any, content: Tensor, deadline: float | None = None) -> None:
        """Wait for what was begun with `content`, until `deadline` by `time.monotonic`.

        Any thread may.  On an accelerator only what this thread gives its current stream waits.

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
        """End all waits, now and later, with `error`; called by the watch."""
        self._error = error
        for group in (self._up, self._down):
            for other in self._others:  # one whose connection is broken already ends no wait
                with suppress(RuntimeError):  # that its time is over is what it is for
                    room = torch.empty(1)
                    group.recv([room], self._ranks.index(other), _END).wait(_AT_ONCE)
        for group in self._of_tag.values():
            with suppress(RuntimeError):
                group.abort()
