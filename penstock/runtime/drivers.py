"""Drive programs in the calling thread: of all ranks, or of this process.  See also `workers`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from penstock.mesh import Mesh
from penstock.planner.plan import Plan
from penstock.schedules.ir import Instruction, ReduceGradients, Schedule
from penstock.schedules.walk import walk
from penstock.transport.channels import LoopbackChannels
from penstock.transport.processes import CapturedChannels, LatestMessages, ProcessChannels

from .caller import CallerContext
from .executor import Executor
from .memory.kept_bytes import note_out_of_memory
from .run import Run
from .stage.stage import Stage


@dataclass(frozen=True, slots=True)
class Work:
    """One run to drive: the lowered schedule, the stages by number, the caller's modes.

    With `casts`, ranks enter the caller's autocast, in forwards or in recomputes.
    """

    schedule: Schedule
    stages: Mapping[int, Stage]
    run: Run
    caller: CallerContext
    casts: bool


class AbstractDriver(ABC):
    """Runs a lowered schedule to its end."""

    @abstractmethod
    def drive(self, work: Work) -> None:
        """Execute all programs to their end; raise the first error of a rank, with a note."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release threads; the next run starts new ones."""


class CanCapture(AbstractDriver):
    """A driver whose runs a CUDA graph can capture."""

    @abstractmethod
    def drive_captured(self, work: Work, messages: Any) -> None:
        """Execute all programs while a graph captures, but for the sums over replicas.

        `messages` are those of an eager run with the same key.
        """

    def messages(self) -> Any:
        """Describe the messages of the latest run, to compare; None if there are none."""

    def forget(self) -> None:
        """Forget a capture that has failed in some process; all processes call this."""


class CallerDriver(CanCapture):
    """Runs all ranks in the calling thread, always in the same order."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def drive(self, work: Work) -> None:
        channels = LoopbackChannels()
        executors = [
            Executor(rank, program, work.stages, work.run, channels)
            for rank, program in enumerate(work.schedule.programs)
        ]
        with _threads(self._num_threads), work.caller.entered():
            for rank, instruction in walk(work.schedule):
                try:
                    executors[rank].execute(instruction)
                except RuntimeError as error:
                    note_out_of_memory(error, instruction, work.run)
                    raise
        for executor in executors:
            executor.finish()

    def drive_captured(self, work: Work, messages: Any) -> None:
        self.drive(work)


class ProcessDriver(CanCapture):
    """Runs this process's program in the calling thread; the other programs run elsewhere."""

    def __init__(self, mesh: Mesh, plan: Plan, *, captures: bool = False) -> None:
        self._rank, self._num_threads = mesh.stage, plan.threads_per_stage
        self._channels = ProcessChannels(mesh, plan.placement.places, captures=captures)

    def drive(self, work: Work) -> None:
        programs = work.schedule.programs
        program = programs[self._rank] if self._rank < len(programs) else ()  # an idle process
        self._run(work, program, self._channels)

    def messages(self) -> LatestMessages:
        return self._channels.latest()

    def drive_captured(self, work: Work, messages: LatestMessages) -> None:
        program = work.schedule.programs[self._rank]
        local = [x for x in program if not isinstance(x, ReduceGradients)]
        channels: Any = self._channels
        if (wires := channels.wires) is not None:
            how = work.schedule, self._rank, messages
            channels = CapturedChannels(channels, wires, *how)
        self._run(work, local, channels)

    def _run(self, work: Work, program: Sequence[Instruction], channels: Any) -> None:
        executor = Executor(self._rank, program, work.stages, work.run, channels)
        with _threads(self._num_threads), self._channels.run(work.schedule):
            with work.caller.entered():
                executor.execute_all()
            channels.finish()
        executor.finish()

    def forget(self) -> None:
        self._channels.forget_links()


@contextmanager
def _threads(num_threads: int) -> Iterator[None]:
    """Let this thread's kernels use `num_threads` threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
