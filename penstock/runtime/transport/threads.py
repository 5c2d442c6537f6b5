"""Threads: one persistent worker per rank, values handed over in memory without a copy."""

import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import torch

from penstock.errors import WaitTimeout
from penstock.mesh.threads import leave_behind
from penstock.runtime.caller import keeping_casts
from penstock.runtime.channels import AbstractChannels, Stopped
from penstock.runtime.devices import num_cores
from penstock.runtime.executor import Executor
from penstock.runtime.notes import note_worker
from penstock.schedules.ir import Instruction
from penstock.schedules.text import instruction_to_text
from penstock.schedules.walk import Message, sent_message

from .base import AbstractTransport, Work

_ABORT = object()


class _Queues(AbstractChannels):
    """One queue per direction of an edge; messages leave it in the order they were sent.

    `turns` are held by ranks that run, and given back while they wait: no more ranks run at once
    than the cores can carry, for Python's lock makes many that do slower than a few.
    """

    def __init__(self, work: Work, timeout_s: float, turns: AbstractContextManager[Any]) -> None:
        self._timeout_s = timeout_s
        self.turns = turns
        self._run = work.run
        messages = (sent_message(instruction) for _, instruction in work.schedule)
        self._queues: dict[tuple[bool, int, int], SimpleQueue[Any]] = {
            message[:3]: SimpleQueue() for message in messages if message is not None
        }

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
            what = "gradient" if is_gradient else "activation"
            raise WaitTimeout(
                f"stage {target} waited {self._timeout_s:g} s at "
                f"{instruction_to_text(instruction)} for the {what} of micro-batch {microbatch} "
                f"from stage {source}, which did not send it. If one layer may take that long, "
                "raise timeout_s"
            ) from None
        finally:
            self.turns.__enter__()

    def abort(self) -> None:
        """Wake every rank that waits."""
        for queue in self._queues.values():
            queue.put(_ABORT)


class ThreadTransport(AbstractTransport):
    """Drives each rank in a thread of its own; the threads live until `close`."""

    def __init__(self, num_threads: int, timeout_s: float) -> None:
        self._num_threads = num_threads
        self._timeout_s = timeout_s
        self._inboxes: list[SimpleQueue[Any]] = []
        self._threads: list[threading.Thread] = []
        self._finalizer: weakref.finalize[..., Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ThreadTransport, (self._num_threads, self._timeout_s)  # a copy has its own threads

    def drive(self, work: Work) -> None:
        self._start(work.schedule.num_ranks)
        channels = _Queues(work, self._timeout_s, self._turns(work))
        done: SimpleQueue[None] = SimpleQueue()
        jobs = [
            _Job(work, Executor(rank, program, work.stages, work.run, channels), channels, done)
            for rank, program in enumerate(work.schedule.programs)
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
        most = max(1, num_cores() // self._num_threads)
        on_gpu = any(stage.device.is_cuda for stage in work.stages.values())
        if on_gpu or work.schedule.num_ranks <= most:
            return nullcontext()
        return threading.Semaphore(most)

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
        self, work: Work, executor: Executor, channels: _Queues, done: "SimpleQueue[None]"
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
