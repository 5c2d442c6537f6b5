"""Collectives of tensors along an axis of the mesh: torch.distributed's, with deadline and blame.

    all_reduce       the sum, on every process             begin_all_reduce ──► finish, of several
    all_gather       all tensors, on every process
    reduce_scatter   a part of the sum on each
    all_to_all       a part of each process on each
    broadcast        one process's tensor, on every one

All processes of an axis make the same calls in the same order, with tensors of known sizes; with
one process a call does nothing.  `purpose` completes "rank 1 (stage 1) waited ...".

On an accelerator the calling thread begins and ends a collective: its current stream waits for the
result.  Then a thread waits for that stream, so that the caller has a deadline.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .background import Background, Worker

_T = TypeVar("_T")
Shape = Sequence[int]
"""Lengths of the dims of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """The thread that waits for other processes, and the explanation of a failed wait.

    With `blames`, a failed wait raises an error that names the culprit, and tells all processes.
    Without, it raises the plain error, for a thread that waits for this one.
    """

    background: Background
    controls: Worker
    blames: bool = True

    def run(self, job: Callable[[], Any], purpose: str) -> Any:
        """Return the result of a job that waits for others, or raise PeerError or WaitTimeout."""
        slot = self.controls.submit(job)
        if self.blames:
            return self.background.wait(slot, purpose)
        return slot.get(self.background.timeout_s)

    def explained(self, error: RuntimeError, purpose: str) -> BaseException:
        """Return the error to raise for one of torch.distributed in this thread."""
        return self.background.blame(error, purpose, None) if self.blames else error


class Begun(NamedTuple, Generic[_T]):
    """A collective under way; `end` waits for it and returns its result.

    On an accelerator's `device` only the current stream waits; None stands for the CPU.
    """

    end: Callable[[], _T]
    device: torch.device | None = None


class Shared:
    """Base of connections between processes; a copy of a pipeline shares them."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collectives(Shared):
    """The collectives of processes with these global `ranks`; this one is number `rank`.

    With `host_waits`, a call returns once an accelerator has the result.  Without, it returns at
    once, and the current stream waits: for calls between a step's kernels.  Every call may raise
    PeerError or WaitTimeout.
    """

    rank: int = 0
    ranks: Sequence[int] = (0,)
    waits: Waits | None = None
    group: Any = None
    host_waits: bool = field(default=True, repr=False)

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.ranks)

    def all_reduce(self, tensor: Tensor, purpose: str, by: Any = None) -> None:
        """Put the sum of all into `tensor`, or another reduction: `by`, a dist.ReduceOp."""
        self._run(partial(self.begin_all_reduce, tensor, by), tensor, purpose)

    def all_gather(
        self, tensor: Tensor, purpose: str, shapes: Sequence[Shape] | None = None
    ) -> list[Tensor]:
        """Return the tensors of all, in the order of ranks; `shapes` if they differ."""
        if self.size == 1:
            return [tensor]
        sent = tensor
        if shapes is not None:  # pad: torch gathers equal numbers of elements
            sent = tensor.new_zeros(max(map(prod, shapes)))
            sent[: tensor.numel()] = tensor.reshape(-1)
        rows = [torch.empty_like(sent) for _ in self.ranks]
        self._do(partial(dist.all_gather, rows, sent), tensor, purpose)
        if shapes is None:
            return rows
        pairs = zip(rows, shapes, strict=True)
        return [row[: prod(shape)].view(*shape) for row, shape in pairs]

    def reduce_scatter(self, parts: Sequence[Tensor], purpose: str) -> Tensor:
        """Return the sum of part `parts[rank]` of all processes; parts may be uneven."""
        shapes = [parts[self.rank].shape] * self.size
        # Added here, in the order of ranks: a backend would choose an order of its own.
        first, *others = self.all_to_all(parts, shapes, purpose)
        total = first.clone()
        for part in others:
            total += part
        return total

    def all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape], purpose: str
    ) -> list[Tensor]:
        """Send `parts[r]` to process r; return the tensors sent here, of these `shapes`."""
        if self.size == 1:
            return list(parts)
        first, width = parts[0], parts[0].element_size()
        sent = torch.cat([part.reshape(-1) for part in parts]).view(torch.uint8)  # as bytes
        sizes = [width * prod(shape) for shape in shapes]
        sent_sizes = [width * part.numel() for part in parts]
        received = sent.new_empty(sum(sizes))
        exchange = partial(dist.all_to_all_single, received, sent, sizes, sent_sizes)
        self._do(exchange, first, purpose)
        flat = received.view(first.dtype).split([prod(shape) for shape in shapes])
        return [part.view(*shape) for part, shape in zip(flat, shapes, strict=True)]

    def broadcast(self, source: int, tensor: Tensor, purpose: str) -> None:
        """Overwrite a contiguous tensor with its values on process `source`."""
        if self.size == 1:
            return
        as_bytes = tensor.reshape(-1).view(torch.uint8)  # gloo lacks some types
        rank = self.ranks[source]
        self._do(partial(dist.broadcast, as_bytes, rank), tensor, purpose)

    def copy_from_first(self, tensors: Iterable[Tensor], purpose: str) -> None:
        """Set tensors to their values on the first process."""
        with torch.no_grad():
            for tensor in tensors:
                values = tensor.detach().contiguous()
                self.broadcast(0, values, purpose)
                tensor.copy_(values)

    def begin_all_reduce(self, tensor: Tensor, by: Any = None) -> Begun[Tensor]:
        """Begin an `all_reduce`."""
        if self.size == 1:
            return Begun(lambda: tensor)
        by = dist.ReduceOp.SUM if by is None else by
        work = dist.all_reduce(tensor, by, group=self.group, async_op=True)
        return _begun(work, tensor, lambda: tensor)

    def finish(self, begun: Sequence[Begun[Any]], purpose: str) -> list[Any]:
        """Wait for collectives under way; return their results."""
        if self.waits is None or not begun:
            return [one.end() for one in begun]
        on_cpu = [one for one in begun if one.device is None]
        ended = self.waits.run(lambda: [one.end() for one in on_cpu], purpose) if on_cpu else []
        left = iter(ended)
        return [
            next(left) if one.device is None else self._ended(one, one.device, purpose)
            for one in begun
        ]

    def _do(self, collective: Callable[..., Any], tensor: Tensor, purpose: str) -> None:
        """Run one of torch's collectives, whose results are like `tensor`."""

        def begin() -> Begun[None]:
            return _begun(collective(group=self.group, async_op=True), tensor, lambda: None)

        self._run(begin, tensor, purpose)

    def _run(self, begin: Callable[[], Begun[_T]], tensor: Tensor, purpose: str) -> _T:
        if self.size == 1:
            return begin().end()
        assert self.waits is not None, "there is one process only"
        if tensor.is_cpu:
            on_cpu: _T = self.waits.run(lambda: begin().end(), purpose)
            return on_cpu
        try:
            begun = begin()
        except RuntimeError as error:
            raise self.waits.explained(error, purpose) from error
        return self._ended(begun, tensor.device, purpose)

    def _ended(self, begun: Begun[_T], device: torch.device, purpose: str) -> _T:
        """End a collective on an accelerator in this thread, whose current stream waits."""
        assert self.waits is not None, "there is one process only"
        try:
            result = begun.end()
        except RuntimeError as error:
            raise self.waits.explained(error, purpose) from error
        if self.host_waits:
            self.waits.run(reached(device), purpose)
        return result

    def fail(self, error: BaseException) -> None:
        """End all collectives under way on accelerators, after a process has failed."""
        with suppress(RuntimeError):
            self.group.abort()


def patient(timeout_s: float) -> timedelta:
    """Return torch's deadline for accelerators: it ends the process, so Penstock's comes first."""
    return timedelta(seconds=2 * timeout_s + 60)


def reached(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until the device has done what its current stream has so far.

    Any thread may call it.
    """
    event = torch.accelerator.current_stream(device).record_event()
    return event.synchronize


def _begun(work: Any, tensor: Tensor, end: Callable[[], _T]) -> Begun[_T]:
    """Return a collective under way on a tensor; `end` makes its result once it is there."""

    def wait() -> _T:
        work.wait()
        return end()

    return Begun(wait, None if tensor.is_cpu else tensor.device)
