"""A group over a process group of torch: plain data on gloo, tensors where they are."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PeerError, PenstockError

from .agreement import ROW_WIDTH, check_same_kind, digest, kind_of_call, name_difference
from .background import Background, Slot, Worker
from .group import AbstractGroup, Row
from .plain_data import HEAD, PLAIN, Codec, body_bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job returned, or raised in this process."""

    value: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        """Return what the job returned, or raise what it raised."""
        if self.error is not None:
            raise self.error
        return self.value

    def told(self) -> tuple[str, Any]:
        """Return it as plain data: the class of the error, "" for none, and what it says."""
        if self.error is None:
            return "", self.value
        text = str(self.error)
        notes = [text, *getattr(self.error, "__notes__", [])]
        return type(self.error).__name__, notes


def outcome_of(job: Callable[[], Any]) -> Outcome:
    """Run a job and keep what came of it."""
    try:
        return Outcome(job())
    except Exception as error:
        return Outcome(error=error)


def result_of(told: tuple[str, Any], teller: str) -> Any:
    """Return the result that another process told of, or raise its error.

    Raises:
        PenstockError: the job raised one like this there.
        PeerError: it raised something else.
    """
    name, said = told
    if not name:
        return said
    text, *notes = said
    kind = vars(sys.modules[PenstockError.__module__]).get(name)
    if not (isinstance(kind, type) and issubclass(kind, PenstockError)):
        raise PeerError(
            f"{teller} failed: {'; '.join([f'{name}: {text}', *notes])}", complete=True
        )
    error = kind.__new__(kind)
    error.args = (text,)
    error.__notes__ = notes
    raise error


_LOOK_S = 5.0
"""How often processes that have ended their work ask whether the others have."""
_SCALARS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_FIRST_BYTES = 256
"""What of a message goes in the first exchange; most need no second one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProcessGroup(AbstractGroup):
    """The processes with these `ranks` among all; `pipelines` describes those made on the mesh.

    `controls` waits for the network, `long` runs what takes long.  With `blames`, a wait that
    fails says who is to blame, and tells all; without, it raises what came, for the thread that
    waits for this one.
    """

    rank: int
    ranks: Sequence[int]
    background: Background
    controls: Worker
    long: Worker
    pipelines: list[str]
    group: Any = None
    blames: bool = True

    @property
    def size(self) -> int:  # type: ignore[override]
        """How many they are."""
        return len(self.ranks)

    @classmethod
    def of_all(cls, background: Background) -> "ProcessGroup":
        """Return the group of all processes that have met."""
        return cls(
            rank=dist.get_rank(),
            ranks=range(dist.get_world_size()),
            background=background,
            controls=background.controls,
            long=background.long,
            pipelines=[],
        )

    def reporting(self, names: Sequence[str] = ()) -> AbstractContextManager[None]:
        if names:
            self.background.watch.name_ranks(names)
        return self.background.watch.reporting()

    # -- plain data -------------------------------------------------------------------------------

    def gather(self, value: Any, what: str, codec: Codec = PLAIN) -> list[Any]:
        job = partial(gather_messages, codec.encode(value), self.size, self.group)
        return list(map(codec.decode, self._run(job, what)))

    def broadcast(self, value: Any, source: int, what: str, codec: Codec = PLAIN) -> Any:
        message = codec.encode(value) if self.rank == source else b""
        job = partial(broadcast_message, message, self.ranks[source], self.group)
        return codec.decode(self._run(job, what))

    @property
    def num_pipelines(self) -> int:  # type: ignore[override]
        """How many pipelines were made so far."""
        return len(self.pipelines)

    def number_pipeline(self, what: str) -> int:
        self.pipelines.append(f"pipeline {len(self.pipelines)} ({what})")
        return len(self.pipelines) - 1

    def exchange(self, kind: str, pipeline: int, row: Row) -> list[Row]:
        full = [kind_of_call(kind), float(pipeline), *row]
        sent = torch.tensor(full + [0.0] * (ROW_WIDTH - len(full)), dtype=torch.float64)
        rows = [r.tolist() for r in self.stack(sent, "for the others to begin the same call")]
        check_same_kind(rows, self.pipelines)
        return [found[2 : 2 + len(row)] for found in rows]

    def require_same(self, where: str, facts: dict[str, Any]) -> None:
        what = f"for the others to be given the same by {where}"
        mine = {name: repr(value) for name, value in facts.items()}
        words = digest(mine)
        both = torch.cat([words, -words])
        highest = both.clone()  # few bytes, however many processes
        self._reduce(highest, dist.ReduceOp.MAX, what)
        if not torch.equal(highest, both):
            name_difference(where, self.gather(mine, what))

    def highest(self, value: int, what: str) -> int:
        found = torch.tensor(value)
        self._reduce(found, dist.ReduceOp.MAX, what)
        return int(found)

    # -- work -------------------------------------------------------------------------------------

    def work(self, job: Callable[[], Any], what: str) -> Any:
        slot, outcome = self.long.submit(lambda: outcome_of(job)), None
        while True:
            if outcome is None:
                patience_s = min(_LOOK_S, self.background.timeout_s / 4)
                outcome = self._look(slot, patience_s, what)
            if not self.highest(int(outcome is None), what):
                return outcome.result() if outcome is not None else None

    def from_first(self, job: Callable[[], Any], what: str) -> Any:
        mine = self.work(lambda: outcome_of(job) if self.rank == 0 else None, what)
        told = self.broadcast(None if mine is None else mine.told(), 0, what)
        return result_of(told, "rank 0") if mine is None else mine.result()

    def _look(self, slot: Slot, patience_s: float, what: str) -> Any:
        """Return a job's outcome, or None if there is none within `patience_s`."""
        try:
            return slot.get(patience_s)
        except Empty:
            return None
        except PeerError as error:
            if not self.blames:
                raise
            raise self.background.blame(error, what, None) from error

    # -- tensors ----------------------------------------------------------------------------------

    def copy_from(self, source: int, tensor: Tensor, what: str) -> None:
        as_bytes = tensor.reshape(-1).view(torch.uint8)  # gloo does not know all types
        rank = self.ranks[source]
        self._collect(
            partial(dist.broadcast, as_bytes, src=rank, group=self.group, async_op=True),
            tensor,
            what,
        )

    def stack(self, tensor: Tensor, what: str) -> list[Tensor]:
        rows = [torch.empty_like(tensor) for _ in self.ranks]
        start = partial(dist.all_gather, rows, tensor, group=self.group, async_op=True)
        self._collect(start, tensor, what)
        return rows

    def sum(self, tensor: Tensor, what: str) -> None:
        self._reduce(tensor, dist.ReduceOp.SUM, what)

    def sum_scalars(self, scalar: Tensor | None, what: str) -> Tensor:
        values_and_counts = torch.zeros(2, len(_SCALARS), dtype=torch.float64)
        if scalar is not None:
            values_and_counts[:, _SCALARS.index(scalar.dtype)] = torch.stack(
                [scalar.double().cpu(), torch.ones((), dtype=torch.float64)]
            )
        self.sum(values_and_counts, what)
        values, counts = values_and_counts
        total: Tensor = values.sum().to(_SCALARS[int(counts.argmax())])
        return total

    def begin_sum(self, tensor: Tensor) -> Any:
        return partial(_end, dist.all_reduce(tensor, group=self.group, async_op=True), tensor)

    def finish(self, begun: Sequence[Any], what: str) -> None:
        if begun:
            self._run(lambda: [end() for end in begun], what)

    def _reduce(self, tensor: Tensor, by: Any, what: str) -> None:
        start = partial(dist.all_reduce, tensor, by, group=self.group, async_op=True)
        self._collect(start, tensor, what)

    def _collect(self, start: Callable[[], Any], tensor: Tensor, what: str) -> None:
        """Run a collective on a tensor, and wait for it.

        On an accelerator it begins behind what this thread has given that to do.
        """
        if tensor.is_cpu:
            self._run(lambda: _end(start(), tensor), what)
        else:
            self._run(partial(_end, start(), tensor), what)

    def _run(self, job: Callable[[], Any], what: str) -> Any:
        slot = self.controls.submit(job)
        if self.blames:
            return self.background.wait(slot, what)
        return slot.get(self.background.timeout_s)


def _end(work: Any, tensor: Tensor) -> None:
    """Wait for a collective; on an accelerator its end is only in line when `wait` returns."""
    work.wait()
    if not tensor.is_cpu:
        torch.accelerator.synchronize(tensor.device)


def gather_messages(message: bytes, size: int, group: Any = None) -> list[bytes]:
    """Return the messages of all `size` processes of a group of torch."""
    firsts = _gather_rows(message[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"), size, group)
    sizes = [HEAD.size + body_bytes(first) for first in firsts]
    rests = [b""] * size
    if (longest := max(sizes) - _FIRST_BYTES) > 0:
        rests = _gather_rows(message[_FIRST_BYTES:].ljust(longest, b"\0"), size, group)
    return [(a + b)[:n] for a, b, n in zip(firsts, rests, sizes, strict=True)]


def _gather_rows(row: bytes, size: int, group: Any) -> list[bytes]:
    sent = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    rows = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather(rows, sent, group=group)
    return [found.numpy().tobytes() for found in rows]


def broadcast_message(message: bytes, source: int, group: Any = None) -> bytes:
    """Return the message of the process with rank `source`, to all of a group of torch."""
    first = _broadcast_row(message[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"), source, group)
    size = HEAD.size + body_bytes(first)
    rest = b""
    if (more := size - _FIRST_BYTES) > 0:
        rest = _broadcast_row(message[_FIRST_BYTES:].ljust(more, b"\0"), source, group)
    return (first + rest)[:size]


def _broadcast_row(row: bytes, source: int, group: Any) -> bytes:
    sent = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    dist.broadcast(sent, src=source, group=group)
    return sent.numpy().tobytes()


def told_by_first(value: Any) -> Any:
    """Return rank 0's value to all processes that have met; for before there is a mesh."""
    return PLAIN.decode(broadcast_message(PLAIN.encode(value), 0))
