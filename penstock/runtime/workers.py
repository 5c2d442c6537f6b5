"""Worker threads that run the programs of one process: one persistent thread per rank."""

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import torch

from penstock.mesh.threads import leave_behind
from penstock.transport.channels import Stopped
from penstock.transport.threads import QueueChannels

from .caller import keeping_casts
from .devices import num_cores
from .drivers import AbstractDriver, Work
from .executor import Executor
from .notes import note_worker


class ThreadDriver(AbstractDriver):
    """Runs each rank's program in a thread of its own; the threads live until `close`."""

    def __init__(self, num_threads: int, timeout_s: float) -> None:
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._most_at_once = max(1, num_cores() // num_threads)
        self._inboxes: list[SimpleQueue[Any]] = []
        self._threads: list[threading.Thread] = []
        self._finalizer: weakref.finalize[..., Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ThreadDriver, (self._num_threads, self._timeout_s)  # a copy has its own threads

    def drive(self, work: Work) -> None:
        programs = work.schedule.programs
        self._start(len(programs))
        transfers = [t for stage in work.stages.values() for t in stage.plan.transfers]
        channels = QueueChannels(transfers, self._timeout_s, self._turns(work))
        done: SimpleQueue[None] = SimpleQueue()
        jobs = [
            _Job(work, Executor(rank, program, work.stages, work.run, channels), channels, done)
            for rank, program in enumerate(programs)
        ]
        waiting = 0
        try:
            for inbox, job in zip(self._inboxes, jobs, strict=False):
                inbox.put(job)
                waiting += 1
            while waiting:
                done.get(timeout=None if work.run.failure is None else self._timeout_s)
                waiting -= 1
        except Empty:
            self._abandon()
        except BaseException as error:  # Ctrl-C: the workers must not outlive the call
            work.run.fail(error)
            channels.abort()
            self._drain(done, waiting)
            raise
        finally:
            if _casts(work):  # no rank did: others still used them
                torch.clear_autocast_cache()
        if work.run.failure is not None:
            _raise_failure(work)

    def _turns(self, work: Work) -> AbstractContextManager[Any]:
        on_gpu = any(stage.device.is_cuda for stage in work.stages.values())
        if on_gpu or len(work.schedule.programs) <= self._most_at_once:
            return nullcontext()
        return threading.Semaphore(self._most_at_once)

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._abandon()

    def _start(self, num_ranks: int) -> None:
        if len(self._inboxes) >= num_ranks:
            return
        self.close()
        self._inboxes = [SimpleQueue() for _ in range(num_ranks)]
        ready: SimpleQueue[None] = SimpleQueue()
        threads = [
            threading.Thread(
                target=_serve,
                args=(inbox, self._num_threads, ready),
                name=f"penstock-rank-{rank}",
                daemon=True,
            )
            for rank, inbox in enumerate(self._inboxes)
        ]
        for thread in threads:
            thread.start()
        for _ in threads:
            ready.get()
        torch.set_num_threads(
            torch.get_num_threads()
        )  # a worker's count is also the next thread's default
        self._threads = threads
        self._finalizer = weakref.finalize(self, _stop, self._inboxes, threads)

    def _drain(self, done: "SimpleQueue[None]", waiting: int) -> None:
        try:
            for _ in range(waiting):
                done.get(timeout=self._timeout_s)
        except (Empty, KeyboardInterrupt):
            self._abandon()

    def _abandon(self) -> None:
        """Forget the workers: one is stuck in user code.  The next run starts new ones."""
        if self._finalizer is not None:
            self._finalizer.detach()
        for inbox in self._inboxes:
            inbox.put(None)
        self._inboxes, self._finalizer = [], None
        leave_behind(self._threads)
        self._threads = []


def _raise_failure(work: Work) -> NoReturn:
    """Raise what a rank raised; the run, which its traceback holds, must not hold it in turn."""
    failure, work.run.failure = work.run.failure, Stopped()
    assert failure is not None
    try:
        raise failure
    finally:
        del failure, work


def _casts(work: Work) -> bool:
    """Tell whether ranks enter the caller's autocast: to begin with, or for a recompute."""
    return work.caller.casts or work.run.caller.casts


class _Job:
    """One program for one worker."""

    def __init__(
        self, work: Work, executor: Executor, channels: QueueChannels, done: "SimpleQueue[None]"
    ) -> None:
        self._work, self._executor, self._channels, self._done = work, executor, channels, done

    def __call__(self) -> None:
        try:
            self._work.caller.variables.copy().run(self._run)
        except Stopped:
            pass
        except BaseException as error:
            note_worker(error)
            self._work.run.fail(error)
            self._channels.abort()
        finally:
            self._done.put(None)

    def _run(self) -> None:
        keeping = keeping_casts() if _casts(self._work) else nullcontext()
        with keeping, self._work.caller.entered(), self._channels.turns:
            self._executor.execute_all()
        self._executor.finish()


def _serve(inbox: "SimpleQueue[Any]", num_threads: int, ready: "SimpleQueue[None]") -> None:
    torch.get_num_threads()  # a thread's first look takes over the process's count: have it now
    torch.set_num_threads(num_threads)
    ready.put(None)
    while (job := inbox.get()) is not None:
        job()
        del job  # or the last step's tensors would live until the next one


def _stop(inboxes: "list[SimpleQueue[Any]]", threads: list[threading.Thread]) -> None:
    for inbox in inboxes:
        inbox.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=5.0)
