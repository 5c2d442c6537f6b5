"""Tensors along an axis of the mesh: what torch.distributed does, with a deadline and blame.

    all_reduce       everyone has the sum                  begin_all_reduce       finish
    all_gather       everyone has what all have            begin_all_gather  ──►  waits for
    reduce_scatter   each has its part of the sum          begin_reduce_scatter   several
    all_to_all       each has a part from everyone
    broadcast        everyone has what one has

All processes of an axis make the same calls in the same order, with tensors of sizes that all
know; a process that is alone does nothing.  `what` completes "rank 1 (stage 1) waited ...".
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .background import Background, Worker

_T = TypeVar("_T")
Shape = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How this process waits for others: the thread that does, and what is said if it fails.

    With `blames`, a wait that fails says who is to blame, and tells all; without, it raises what
    came, for the thread that waits for this one.
    """

    background: Background
    controls: Worker
    blames: bool = True

    def run(self, job: Callable[[], Any], what: str) -> Any:
        """Run a job that waits for other processes; return its result.

        Raises:
            PeerError: another process failed, or is gone.
            WaitTimeout: the others do not come to it within the deadline.
        """
        slot = self.controls.submit(job)
        if self.blames:
            return self.background.wait(slot, what)
        return slot.get(self.background.timeout_s)


class Begun(NamedTuple):
    """A collective that was begun: the end of it returns its result."""

    end: Callable[[], Any]


class Shared:
    """Base of what holds processes together: a copy of a pipeline has the same, not a copy."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collectives(Shared):
    """The processes with these `ranks` among all, of which this one is number `rank`.

    Raises:
        PeerError: by every call: another process failed, or is gone.
        WaitTimeout: by every call: the others do not come to it within the deadline.
    """

    rank: int = 0
    ranks: Sequence[int] = (0,)
    waits: Waits | None = None
    group: Any = None

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor, what: str, by: Any = None) -> None:
        """Put the sum of all into `tensor`, or what `by` (a dist.ReduceOp) makes of them."""
        self._run(partial(self.begin_all_reduce, tensor, by), tensor, what)

    def all_gather(
        self, tensor: Tensor, what: str, shapes: Sequence[Shape] | None = None
    ) -> list[Tensor]:
        """Return the tensors of all, in the order of ranks; `shapes` where they are not alike."""
        found: list[Tensor] = self._run(
            partial(self.begin_all_gather, tensor, shapes), tensor, what
        )
        return found

    def reduce_scatter(self, parts: Sequence[Tensor], what: str) -> Tensor:
        """Return the sum of this process's part of all, `parts[rank]`; parts may be uneven.

        They are added in the order of ranks, so that a sum is the same whatever the backend.
        """
        total: Tensor = self._run(partial(self.begin_reduce_scatter, parts), parts[0], what)
        return total

    def all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], what: str
    ) -> list[Tensor]:
        """Send `parts[r]` to process r, and return what each sends here, of such `shapes`."""
        found: list[Tensor] = self._run(
            partial(self._begin_all_to_all, parts, shapes), parts[0], what
        )
        return found

    def broadcast(self, source: int, tensor: Tensor, what: str) -> None:
        """Overwrite a contiguous tensor by the values that it has on process `source`."""
        if self.size == 1:
            return
        as_bytes = tensor.reshape(-1).view(torch.uint8)  # gloo does not know all types
        rank = self.ranks[source]

        def begin() -> Begun:
            work = dist.broadcast(as_bytes, src=rank, group=self.group, async_op=True)
            return Begun(lambda: _end(work, tensor, None))

        self._run(begin, tensor, what)

    def copy_from_first(self, tensors: Iterable[Tensor], what: str) -> None:
        """Set tensors to the values that they have on the first process."""
        with torch.no_grad():
            for tensor in tensors:
                values = tensor.detach().contiguous()
                self.broadcast(0, values, what)
                tensor.copy_(values)

    def begin_all_reduce(self, tensor: Tensor, by: Any = None) -> Begun:
        """Begin an `all_reduce`."""
        if self.size == 1:
            return Begun(lambda: tensor)
        by = dist.ReduceOp.SUM if by is None else by
        work = dist.all_reduce(tensor, by, group=self.group, async_op=True)
        return Begun(lambda: _end(work, tensor, tensor))

    def begin_all_gather(self, tensor: Tensor, shapes: Sequence[Shape] | None = None) -> Begun:
        """Begin an `all_gather`."""
        if self.size == 1:
            return Begun(lambda: [tensor])
        sent = tensor
        if shapes is not None:  # as many elements are sent by all
            sent = tensor.new_zeros(max(map(prod, shapes)))
            sent[: tensor.numel()] = tensor.reshape(-1)
        rows = [torch.empty_like(sent) for _ in self.ranks]
        work = dist.all_gather(rows, sent, group=self.group, async_op=True)
        return Begun(lambda: _cut(_end(work, tensor, rows), shapes))

    def begin_reduce_scatter(self, parts: Sequence[Tensor]) -> Begun:
        """Begin a `reduce_scatter`."""
        exchanged = self._begin_all_to_all(parts, [parts[self.rank].shape] * self.size)
        return Begun(lambda: _sum(exchanged.end()))

    def _begin_all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> Begun:
        """Begin an `all_to_all`; values travel as bytes."""
        if self.size == 1:
            return Begun(lambda: list(parts))
        first, width = parts[0], parts[0].element_size()
        sent = torch.cat([part.reshape(-1) for part in parts]).view(torch.uint8)
        sizes = [width * prod(shape) for shape in shapes]
        received = sent.new_empty(sum(sizes))
        work = dist.all_to_all_single(
            received,
            sent,
            sizes,
            [width * part.numel() for part in parts],
            group=self.group,
            async_op=True,
        )
        return Begun(lambda: _views(_end(work, first, received), shapes, first.dtype))

    def finish(self, begun: Sequence[Begun], what: str) -> list[Any]:
        """Wait for what was begun; return the results."""
        if self.waits is None or not begun:
            return [each.end() for each in begun]
        found: list[Any] = self.waits.run(lambda: [each.end() for each in begun], what)
        return found

    def _run(self, begin: Callable[[], Begun], tensor: Tensor, what: str) -> Any:
        """Run a collective on a tensor, and wait for it.

        On an accelerator it begins behind what this thread has given that to do.
        """
        if self.size == 1:
            return begin().end()
        assert self.waits is not None, "there is one process only"
        if tensor.is_cpu:
            return self.waits.run(lambda: begin().end(), what)
        return self.waits.run(begin().end, what)


def _end(work: Any, tensor: Tensor, result: _T) -> _T:
    """Wait for a collective, and return its result; on an accelerator its end is only in line when
    `wait` returns.
    """
    work.wait()
    if not tensor.is_cpu:
        torch.accelerator.synchronize(tensor.device)
    return result


def _cut(rows: list[Tensor], shapes: Sequence[Shape] | None) -> list[Tensor]:
    if shapes is None:
        return rows
    pairs = zip(rows, shapes, strict=True)
    return [row[: prod(shape)].view(*shape) for row, shape in pairs]


def _views(received: Tensor, shapes: Sequence[Shape], dtype: torch.dtype) -> list[Tensor]:
    parts = received.view(dtype).split([prod(shape) for shape in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
