"""Threads that wait for the network, so that the main thread can stop waiting when a peer fails.

controls   collectives of a few numbers
receives   large messages, one after the other, in the order the program wants them
sends-...  messages that others have not yet taken; started where stages send any
long       work of an unknown length that all processes wait for, such as reading a checkpoint
saves      checkpoints that are written while training goes on, one after the other
saves-...  as controls and long, but for these checkpoints, over a process group of their own
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from penstock.errors import PeerError

from .threads import THREAD_PREFIX
from .watch import Watch

WAIT_FAILURES = (Empty, TimeoutError, ConnectionError, PeerError)
"""What waiting for another process may raise; `Background.blame` says more."""
_PATIENCE_S, _SHORT_PATIENCE_S = 5.0, 0.1
"""How long to wait for a thread to end; the second where a peer has failed."""


class Slot:
    """Where the outcome of a job appears."""

    def __init__(self) -> None:
        self._outcome: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

    def succeed(self, result: Any) -> None:
        self._outcome.put((True, result))

    def fail(self, error: BaseException) -> None:
        self._outcome.put((False, error))

    def get(self, timeout_s: float | None) -> Any:
        """Return the outcome, once it is there.

        Raises:
            Empty: there is none within `timeout_s`.
            BaseException: what the job raised, or the watch found out.
        """
        good, outcome = self._outcome.get(timeout=timeout_s)
        if good:
            return outcome
        raise outcome


class Background:
    """The threads of a process that wait for others."""

    def __init__(self, watch: Watch, timeout_s: float) -> None:
        self.watch = watch
        self.timeout_s = timeout_s
        self._workers: list[Worker] = []
        self.receives = self.new_worker("receives")
        self.controls = self.new_worker("controls")
        self.long = self.new_worker("long")
        self.saves = self.new_worker("saves")
        self.saves_controls = self.new_worker("saves-controls")
        self.saves_long = self.new_worker("saves-long")
        self._saving_group: Any = None

    def saving_group(self) -> Any:
        """Return the group over which checkpoints are saved, made at the first call.

        All processes call this alike.
        """
        if self._saving_group is None:
            limit = timedelta(seconds=self.timeout_s)
            self._saving_group = self.run(
                lambda: dist.new_group(backend="gloo", timeout=limit), "for all to begin to save"
            )
        return self._saving_group

    def new_worker(self, name: str) -> "Worker":
        """Start one more thread; it ends with the others."""
        self._workers.append(Worker(name, self.watch))
        return self._workers[-1]

    def wait(self, slot: Slot, what: str, peer: int | None = None) -> Any:
        """Wait for a job's outcome; `what` and `peer` are as in `blame`.

        Raises:
            PeerError: another process failed, or is gone.
            WaitTimeout: there is no outcome within the deadline.
        """
        return self._wait(slot, self.timeout_s, what, peer)

    def begin_save(self, job: Callable[[], None], what: str) -> Callable[[], None]:
        """Run a job behind the saves before it, and return what waits for its end, however long
        that takes; each of its own waits has the deadline.
        """
        slot = self.saves.submit(job)
        return lambda: self._wait(slot, None, what, None)

    def _wait(self, slot: Slot, timeout_s: float | None, what: str, peer: int | None) -> Any:
        try:
            return slot.get(timeout_s)
        except (*WAIT_FAILURES, RuntimeError) as error:
            raise self.blame(error, what, peer) from error

    def blame(self, error: Exception, what: str, peer: int | None) -> BaseException:
        """Turn what ended a wait into who is to blame for it, and tell all.

        `what` completes "rank 1 (stage 1) waited ...".  `peer` is the only rank that was waited
        for, if it is only one.
        """
        if isinstance(error, Empty | TimeoutError):
            return self.watch.overdue(what, self.timeout_s)
        return self.watch.explain(error, what, peer)

    def run(self, job: Callable[[], Any], what: str) -> Any:
        """Run a small collective, and wait for it."""
        return self.wait(self.controls.submit(job), what)

    def end_saves(self) -> None:
        """Wait for the checkpoints that are being written, unless a process has failed."""
        self.saves.finish()
        while self.saves.is_alive and not self.watch.knows_failure:
            self.saves.join(_SHORT_PATIENCE_S)

    def close(self) -> None:
        """End the threads, but for one that is stuck in a wait for a peer that failed."""
        patience_s = _SHORT_PATIENCE_S if self.watch.knows_failure else _PATIENCE_S
        for worker in self._workers:
            worker.finish()
            worker.join(patience_s)

    @property
    def has_ended(self) -> bool:
        """Whether all threads have ended."""
        return not any(worker.is_alive for worker in self._workers)


class Worker:
    """A thread that runs jobs in the order they come."""

    def __init__(self, name: str, watch: Watch) -> None:
        self._watch = watch
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Slot] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, name=f"{THREAD_PREFIX}{name}", daemon=True
        )
        self._thread.start()

    def submit(self, job: Callable[[], Any]) -> Slot:
        slot = Slot()
        self._watch.wake_on_failure(slot)
        self._jobs.put((job, slot))
        return slot

    def _serve(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, slot = item
            try:
                slot.succeed(job())
            except BaseException as error:
                slot.fail(error)
            self._watch.forget(slot)
            del item, job, slot

    def finish(self) -> None:
        """Let the thread end after the jobs that it was given."""
        self._jobs.put(None)

    def join(self, patience_s: float) -> None:
        """Wait so long for the thread to end."""
        self._thread.join(patience_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()
