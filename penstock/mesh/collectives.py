"""Collectives of all processes over one process group, each with a deadline.

All processes make the same calls in the same order.  In messages, `what` completes
"rank 1 (stage 1) waited ...".
"""

from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import PeerError

from .agreement import outcome_of, result_of
from .background import Background, Slot, Worker

_LOOK_S = 5.0
"""How often processes that have ended their work ask whether the others have."""


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives over `group`; `controls` waits for the network, `long` runs what takes long.

    With `blames`, a wait that fails says who is to blame, and tells all; without, it raises what
    came, for the thread that waits for this one.
    """

    background: Background
    controls: Worker
    long: Worker
    group: Any = None
    blames: bool = True

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the values of all processes, in the order of ranks."""
        everyone: list[Any] = [None] * dist.get_world_size()
        self._run(lambda: dist.all_gather_object(everyone, value, group=self.group), what)
        return everyone

    def highest(self, value: int, what: str) -> int:
        """Return the highest of all processes' values; a cheaper `gather`."""
        found = torch.tensor(value)
        self._run(lambda: dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group), what)
        return int(found)

    def work(self, job: Callable[[], Any], what: str) -> Any:
        """Run a job in every process that may take long, and return when all have ended theirs.

        No deadline runs on it: those that have ended theirs ask the others time and again whether
        they are still at work, in exchanges that are short.  What a job raises is raised when all
        have ended.

        Raises:
            PeerError: another process failed, or is gone.
            WaitTimeout: another process does not answer that it is at work.
        """
        slot, outcome = self.long.submit(lambda: outcome_of(job)), None
        while True:
            if outcome is None:
                patience_s = min(_LOOK_S, self.background.timeout_s / 4)
                outcome = self._look(slot, patience_s, what)
            if not self.highest(int(outcome is None), what):
                return result_of(outcome)

    def from_first(self, job: Callable[[], Any], what: str) -> Any:
        """Run a job that may take long on rank 0 only; return its result on all processes, or
        raise its error on all.

        Raises:
            PenstockError: what `job` raised.
        """
        is_first = self.background.watch.rank == 0
        told = [self.work(lambda: outcome_of(job) if is_first else None, what)]
        self._run(lambda: dist.broadcast_object_list(told, src=0, group=self.group), what)
        return result_of(told[0])

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

    def _run(self, job: Callable[[], Any], what: str) -> None:
        slot = self.controls.submit(job)
        if self.blames:
            self.background.wait(slot, what)
        else:
            slot.get(self.background.timeout_s)
