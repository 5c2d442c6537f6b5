"""Worker threads that run the programs of one process, and the queues between them.

One persistent thread per rank runs `_serve`, which runs one job per step.  Values are handed over
in memory, without a copy.

    caller ── job ──► inbox ──► rank 0 ◄══ queues ══► rank 1 ◄── inbox ◄── job ── caller
    caller ◄─────────── done ◄────┴──────────────────────┘      each ends once, also by an error
"""

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import torch

from penstock.errors import WaitTimeout
from penstock.mesh.threads import leave_behind
from penstock.planner.shared_cores import num_cores
from penstock.schedules.ir import Instruction, Message
from penstock.schedules.transfers import Transfers
from penstock.transport.channels import AbstractChannels, Stopped

from .caller import keeping_casts
from .drivers import AbstractDriver, Work
from .executor import Executor

_ABORT = object()


class QueueChannels(AbstractChannels):
    """One queue per direction of an edge; messages keep their order.

    A rank holds one of the `turns` while it runs, and releases it while it waits.  So no more
    ranks run at once than there are cores: Python's lock would slow them all.
    """

    def __init__(
        self, transfers: Transfers, timeout_s: float, turns: AbstractContextManager[Any]
    ) -> None:
        self._timeout_s = timeout_s
        self.turns = turns
        self._queues: dict[tuple[bool, int, int], SimpleQueue[Any]] = {}
        for transfer in transfers:
            self._queues[False, transfer.producer, transfer.consumer] = SimpleQueue()
            self._queues[True, transfer.consumer, transfer.producer] = SimpleQueue()

    def send(self, message: Message, payload: Any) -> None:
        self._queues[message[:3]].put((message[3], payload))

    def receive(self, message: Message, instruction: Instruction) -> Any:
        queue = self._queues[message[:3]]
        try:
            item = queue.get_nowait()
        except Empty:
            item = self._wait(queue, message, instruction)
        if item is _ABORT:
            raise Stopped
        microbatch, payload = item
        assert microbatch == message[3], "verified: both ends of an edge keep the same order"
        return payload

    def _wait(self, queue: "SimpleQueue[Any]", message: Message, instruction: Instruction) -> Any:
        self.turns.__exit__(None, None, None)
        try:
            return queue.get(timeout=self._timeout_s)
        except Empty:
            is_gradient, source, target, microbatch = message
            kind = "gradient" if is_gradient else "activation"
            raise WaitTimeout(
                f"stage {target} waited {self._timeout_s:g} s at "
                f"{instruction} for the {kind} of micro-batch {microbatch} "
                f"from stage {source}, which did not send it. If one layer may take that long, "
                "raise timeout_s"
            ) from None
        finally:
            self.turns.__enter__()

    def abort(self) -> None:
        """Wake all ranks that wait."""
        for queue in self._queues.values():
            queue.put(_ABORT)


class ThreadDriver(AbstractDriver):
    """Runs each rank's program in its own thread; the threads live until `close`.

    A signal's handler may raise at any place.  The next run then finds living threads, or starts
    new ones.
    """

    def __init__(self, num_threads: int, timeout_s: float) -> None:
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._most_at_once = max(1, num_cores() // num_threads)
        self._workers: _Workers | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ThreadDriver, (self._num_threads, self._timeout_s)  # a copy has its own threads

    def drive(self, work: Work) -> None:
        # 1. Make the queues; with more ranks than cores, let them take turns.
        programs = work.schedule.programs
        workers = self._workers_for(len(programs))
        transfers = [t for stage in work.stages.values() for t in stage.plan.transfers]
        on_gpu = any(stage.device.is_cuda for stage in work.stages.values())
        is_crowded = len(programs) > self._most_at_once and not on_gpu
        turns = threading.Semaphore(self._most_at_once) if is_crowded else nullcontext()
        channels = QueueChannels(transfers, self._timeout_s, turns)
        # 2. Hand out the jobs, and wait: each puts an item into `done` when it ends or raises.
        done: SimpleQueue[None] = SimpleQueue()
        jobs = [
            _Job(work, Executor(rank, program, work.stages, work.run, channels), channels, done)
            for rank, program in enumerate(programs)
        ]
        try:
            self._run(workers, jobs, work, done)
        except BaseException as error:  # Ctrl-C: the workers must not outlive the call
            try:
                work.run.fail(error)
                channels.abort()
                self._run(workers, jobs, work, done)
            except BaseException as again:  # nobody waits a second time
                work.run.fail(again)
                channels.abort()
                self._abandon()
                raise
            raise
        if work.run.failure is not None:
            _raise_failure(work)

    def close(self) -> None:
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.finalizer()
            workers.leave()

    def _workers_for(self, num_ranks: int) -> "_Workers":
        if self._workers is None or len(self._workers.inboxes) < num_ranks:
            self.close()
            workers = _Workers(num_ranks, self._num_threads)
            workers.finalizer = weakref.finalize(self, workers.stop)
            self._workers = workers
        return self._workers

    def _run(
        self, workers: "_Workers", jobs: "list[_Job]", work: Work, done: "SimpleQueue[None]"
    ) -> None:
        """Hand out the jobs that have not ended, and wait for all; each job runs once at most."""
        for inbox, job in zip(workers.inboxes, jobs, strict=False):
            if not job.has_ended:
                inbox.put(job)
        try:
            while not all(job.has_ended for job in jobs):
                done.get(timeout=None if work.run.failure is None else self._timeout_s)
        except Empty:
            self._abandon()

    def _abandon(self) -> None:
        """Forget the workers: one is stuck in user code.  The next run starts new ones."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.finalizer.detach()
            workers.leave()


class _Workers:
    """The threads of one driver, one per rank; `finalizer` stops them with the driver."""

    finalizer: "weakref.finalize[..., Any]"

    def __init__(self, num_ranks: int, num_threads: int) -> None:
        self.inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(num_ranks)]
        ready: SimpleQueue[None] = SimpleQueue()
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(inbox, num_threads, ready),
                name=f"penstock-rank-{rank}",
                daemon=True,
            )
            for rank, inbox in enumerate(self.inboxes)
        ]
        try:
            for thread in self._threads:
                thread.start()
            for _ in self._threads:
                ready.get()
            # A worker's thread count is also the next new thread's default: set ours again.
            torch.set_num_threads(torch.get_num_threads())
        except BaseException:
            self._dismiss()
            raise

    def stop(self) -> None:
        self._dismiss()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    def leave(self) -> None:
        self._dismiss()
        leave_behind(self._threads)

    def _dismiss(self) -> None:
        for inbox in self.inboxes:
            inbox.put(None)


def _raise_failure(work: Work) -> NoReturn:
    """Raise a rank's exception; its traceback holds the run, so the run must not hold it."""
    failure, work.run.failure = work.run.failure, Stopped()
    assert failure is not None
    try:
        raise failure
    finally:
        del failure, work


@dataclass(slots=True, eq=False)
class _Job:
    """One program for one worker; it runs once, however often it is handed out."""

    work: Work
    executor: Executor
    channels: QueueChannels
    done: "SimpleQueue[None]"
    has_ended: bool = False

    def __call__(self) -> None:
        work = self.work
        if self.has_ended:
            return
        try:
            keeping = keeping_casts() if work.casts else nullcontext()
            with keeping, work.caller.entered(), self.channels.turns:
                self.executor.execute_all()
            self.executor.finish()
        except Stopped:
            pass
        except BaseException as error:
            _note_missing(error)
            work.run.fail(error)
            self.channels.abort()
        finally:
            self.has_ended = True
            self.done.put(None)


def _serve(inbox: "SimpleQueue[Any]", num_threads: int, ready: "SimpleQueue[None]") -> None:
    torch.get_num_threads()  # a thread's first look takes over the process's count: have it now
    torch.set_num_threads(num_threads)
    ready.put(None)
    while (job := inbox.get()) is not None:
        job.work.caller.variables.copy().run(job)
        del job  # or the last step's tensors would live until the next one


def _note_missing(error: BaseException) -> None:
    """Explain an AttributeError of a threading.local that the caller's thread has set."""
    if isinstance(error, AttributeError) and isinstance(error.obj, threading.local):
        error.add_note(
            f"{threading.current_thread().name} is a worker thread, and a threading.local has "
            "other values in each thread: what the caller set is not there. Use a "
            "contextvars.ContextVar, whose values reach the workers, or "
            "transport=Transport.LOOPBACK, which runs all stages in the calling thread"
        )
