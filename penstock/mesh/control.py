"""Agree on small values along an axis of the mesh: gathers, broadcasts, barriers, joint jobs.

All processes of the axis make the same calls in the same order; with one process a call returns at
once.  `purpose` completes the message "rank 1 (stage 1) waited ...".  Tensors go by `tensors`.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import PeerError

from .agreement import (
    CALLS,
    ROW_WIDTH,
    broadcast_message,
    check_same_kind,
    decode,
    encode,
    gather_messages,
    name_difference,
    outcome_of,
    result_of,
)
from .background import Background, Slot, Worker
from .collectives import Collectives, Shared, Waits

Row = Sequence[float]
"""Numbers that one process announces before a call."""
_LOOK_S = 5.0
"""Seconds between two exchanges in which processes ask whether all have ended their work."""
_SCALARS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Types of a loss, which travels as float64."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Control(Shared):
    """The processes of an axis; `tensors` are their collectives.

    `pipelines` describes the pipelines made on the mesh.  `long` is the thread of long jobs.
    Every call may raise PeerError or WaitTimeout.
    """

    tensors: Collectives = field(default_factory=Collectives)
    long: Worker | None = None
    pipelines: list[str] = field(default_factory=list)

    @classmethod
    def of_all(cls, background: Background) -> "Control":
        """Return the control of all processes after their rendezvous."""
        tensors = Collectives(
            rank=dist.get_rank(),
            ranks=range(dist.get_world_size()),
            waits=Waits(background=background, controls=background.controls),
        )
        return cls(tensors=tensors, long=background.long)

    @property
    def rank(self) -> int:
        """This process's number along the axis."""
        return self.tensors.rank

    @property
    def size(self) -> int:
        """The number of processes along the axis."""
        return len(self.tensors.ranks)

    @property
    def waits(self) -> Waits:
        """The thread that waits for the other processes, and its error reports."""
        assert self.tensors.waits is not None, "there is one process only"
        return self.tensors.waits

    def reporting(self, names: Sequence[str] = ()) -> AbstractContextManager[None]:
        """Tell all processes of any error raised inside, so that none waits for this one.

        `names` describe each rank in messages.
        """
        if self.tensors.waits is None:
            return nullcontext()
        if names:
            self.waits.background.watch.names = list(names)
        return self.waits.background.watch.reporting()

    # -- objects ----------------------------------------------------------------------------------

    def gather(self, value: Any, purpose: str) -> list[Any]:
        """Return the values of all processes, in the order of ranks."""
        if self.size == 1:
            return [value]
        job = partial(gather_messages, encode(value), self.size, self.tensors.group)
        return list(map(decode, self.waits.run(job, purpose)))

    def broadcast(self, value: Any, source: int, purpose: str) -> Any:
        """Return the value of rank `source`."""
        if self.size == 1:
            return value
        message = encode(value) if self.rank == source else b""
        rank, group = self.tensors.ranks[source], self.tensors.group
        return decode(self.waits.run(partial(broadcast_message, message, rank, group), purpose))

    def number_pipeline(self, description: str) -> int:
        """Number a pipeline that all processes make; `description` describes it in messages.

        Calls carry this number, so that calls for two pipelines never mix.
        """
        if self.size == 1:
            return 0
        self.pipelines.append(f"pipeline {len(self.pipelines)} ({description})")
        return len(self.pipelines) - 1

    def exchange(self, kind: str, pipeline: int, row: Row) -> list[Row]:
        """Begin a call together with all others: one of `agreement.CALLS`, for one pipeline.

        Return the rows of all, in the order of ranks; MeshError if others begin another call.
        """
        if self.size == 1:
            return [row]
        full = [float(CALLS.index(kind)), float(pipeline), *row]
        sent = torch.tensor(full + [0.0] * (ROW_WIDTH - len(full)), dtype=torch.float64)
        gathered = self.tensors.all_gather(sent, "for the others to begin the same call")
        rows = [tensor.tolist() for tensor in gathered]
        check_same_kind(rows, self.pipelines)
        return [full_row[2 : 2 + len(row)] for full_row in rows]

    def begin_call(self, kind: str, pipeline: int) -> None:
        """Check that all make a call of this kind, for one pipeline, or raise MeshError."""
        with self.reporting():
            self.exchange(kind, pipeline, ())

    def require_same(self, where: str, facts: dict[str, Any]) -> None:
        """Compare `facts` by their digest; a ConfigError, on every process, names a difference."""
        if self.size == 1:
            return
        purpose = f"for the others to be given the same by {where}"
        mine = {name: repr(value) for name, value in facts.items()}
        # The maximum of a digest and of its negative: equal only if all are.  It costs few bytes,
        # however many processes; values are gathered only to name a difference.
        raw = sha256(json.dumps(mine).encode()).digest()
        words = torch.frombuffer(bytearray(raw), dtype=torch.int32).long()  # -words fits, too
        both = torch.cat([words, -words])
        highest = both.clone()
        self.tensors.all_reduce(highest, purpose, dist.ReduceOp.MAX)
        if not torch.equal(highest, both):
            name_difference(where, self.gather(mine, purpose))

    def highest(self, value: int, purpose: str) -> int:
        """Return the highest value of all; cheaper than `gather`."""
        highest = torch.tensor(value)
        self.tensors.all_reduce(highest, purpose, dist.ReduceOp.MAX)
        return int(highest)

    def barrier(self, purpose: str) -> None:
        """Return once all processes have come here."""
        self.highest(0, purpose)

    def sum_scalars(self, scalar: Tensor | None, purpose: str) -> Tensor:
        """Return the sum of the scalars of the processes that have one, in their type."""
        if self.size == 1:
            assert scalar is not None
            return scalar
        values_and_counts = torch.zeros(2, len(_SCALARS), dtype=torch.float64)
        if scalar is not None:
            values_and_counts[:, _SCALARS.index(scalar.dtype)] = torch.stack(
                [scalar.double().cpu(), torch.ones((), dtype=torch.float64)]
            )
        self.tensors.all_reduce(values_and_counts, purpose)
        values, counts = values_and_counts
        total: Tensor = values.sum().to(_SCALARS[int(counts.argmax())])
        return total

    # -- work -------------------------------------------------------------------------------------

    def work(self, job: Callable[[], Any], purpose: str) -> Any:
        """Run a long job in every process; return its result, or raise its error, once all ended.

        The job has no deadline: until all have ended, processes exchange short messages, each of
        which has one.
        """
        if self.size == 1:
            return job()
        assert self.long is not None
        slot, outcome = self.long.submit(lambda: outcome_of(job)), None
        while True:
            if outcome is None:
                patience_s = min(_LOOK_S, self.waits.background.timeout_s / 4)
                outcome = self._look(slot, patience_s, purpose)
            if not self.highest(int(outcome is None), purpose):
                return outcome.result() if outcome is not None else None

    def from_first(self, job: Callable[[], Any], purpose: str) -> Any:
        """Run a long job on rank 0; return its result, or raise its error, on all processes.

        On the others, an error that is no PenstockError becomes a PeerError.
        """
        if self.size == 1:
            return job()
        mine = self.work(lambda: outcome_of(job) if self.rank == 0 else None, purpose)
        outcome = self.broadcast(None if mine is None else mine.told(), 0, purpose)
        return result_of(outcome, "rank 0") if mine is None else mine.result()

    def _look(self, slot: Slot, patience_s: float, purpose: str) -> Any:
        """Return a job's outcome, or None if there is none within `patience_s`."""
        try:
            return slot.get(patience_s)
        except Empty:
            return None
        except PeerError as error:
            if not self.waits.blames:
                raise
            raise self.waits.background.blame(error, purpose, None) from error
