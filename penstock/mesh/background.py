"""Threads that wait for the network, so that the main thread can stop waiting when a peer fails.

| thread | work |
|---|---|
| controls | collectives of a few numbers |
| receives | large messages, in the order in which the program needs them |
| sends-... | messages that their receivers have not taken yet |
| long | work of unknown length that all processes wait for, such as reading a checkpoint |
| saves | checkpoints that are written during training, one after the other |
| saves-... | as controls and long, over the process group of these checkpoints |
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
"""Errors of a wait for another process; `Background.blame` explains them."""
_PATIENCE_S = 5.0
"""Seconds to wait for a thread to end."""
_SHORT_PATIENCE_S = 0.1
"""Seconds to wait for a thread to end after a peer has failed."""


class Slot:
    """The future outcome of a job; the first of several counts."""

    def __init__(self) -> None:
        self._outcome: SimpleQueue[tuple[bool, Any]] = SimpleQueue()

    def succeed(self, result: Any) -> None:
        self._outcome.put((True, result))

    def fail(self, error: BaseException) -> None:
        self._outcome.put((False, error))

    def get(self, timeout_s: float | None) -> Any:
        """Return the outcome, or raise the job's or the watch's error; Empty after `timeout_s`."""
        good, outcome = self._outcome.get(timeout=timeout_s)
        if good:
            return outcome
        raise outcome


class Background:
    """The waiting threads of a process."""

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
        """Return the process group of checkpoint saves; all processes make it together."""
        if self._saving_group is None:
            limit = timedelta(seconds=self.timeout_s)
            self._saving_group = self.run(
                lambda: dist.new_group(backend="gloo", timeout=limit), "for all to begin to save"
            )
        return self._saving_group

    def new_worker(self, name: str) -> "Worker":
        """Start one more thread; `close` ends it."""
        self._workers.append(Worker(name, self.watch))
        return self._workers[-1]

    def wait(
        self, slot: Slot, purpose: str, peer: int | None = None, *, has_deadline: bool = True
    ) -> Any:
        """Return a job's outcome, or raise PeerError or WaitTimeout; arguments as of `blame`."""
        try:
            return slot.get(self.timeout_s if has_deadline else None)
        except (*WAIT_FAILURES, RuntimeError) as error:
            raise self.blame(error, purpose, peer) from error

    def blame(self, error: Exception, purpose: str, peer: int | None) -> BaseException:
        """Turn the error of a wait into one that names the culprit; report it to all processes.

        `purpose` completes "rank 1 (stage 1) waited ...".  `peer` is the only rank waited for.
        """
        if isinstance(error, Empty | TimeoutError):
            return self.watch.overdue(purpose, self.timeout_s)
        return self.watch.explain(error, purpose, peer)

    def run(self, job: Callable[[], Any], purpose: str) -> Any:
        """Run a small collective, and wait for it."""
        return self.wait(self.controls.submit(job), purpose)

    def end_saves(self) -> None:
        """Wait for unfinished checkpoint saves, unless a process has failed."""
        self.saves.finish()
        while self.saves.is_alive and not self.watch.knows_failure:
            self.saves.join(_SHORT_PATIENCE_S)

    def close(self) -> None:
        """End the threads, except one stuck in a wait for a failed peer."""
        patience_s = _SHORT_PATIENCE_S if self.watch.knows_failure else _PATIENCE_S
        for worker in self._workers:
            worker.finish()
            worker.join(patience_s)

    @property
    def has_ended(self) -> bool:
        """True if all threads have ended."""
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
            del item, job, slot  # an idle thread keeps no tensors alive

    def finish(self) -> None:
        """Let the thread end after its queued jobs."""
        self._jobs.put(None)

    def join(self, patience_s: float) -> None:
        """Wait at most `patience_s` for the thread to end."""
        self._thread.join(patience_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()
