"""The executor: the only interpreter of schedules that touches tensors."""

import time
from collections.abc import Iterable, Mapping
from typing import assert_never

from penstock.schedules.ir import (
    Backward,
    CommitStatistics,
    Forward,
    Instruction,
    ReceiveActivation,
    ReceiveGradient,
    Recompute,
    SendActivation,
    SendGradient,
)
from penstock.types import Trace

from .devices import Event
from .run import Run
from .stage import Stage
from .transport.base import AbstractChannels, Stopped


class Executor:
    """Executes the instructions of one rank, in order, on its stages."""

    def __init__(
        self, rank: int, stages: Mapping[int, Stage], run: Run, channels: AbstractChannels
    ) -> None:
        self._rank = rank
        self._stages = stages
        self._run = run
        self._channels = channels
        self._on_gpu = any(stage.device.is_cuda for stage in stages.values())
        self._timed = run.trace is not Trace.OFF
        self._times_s: list[float] = []
        self._gpu_marks: list[tuple[Event, Event]] = []
        self._base: Event | None = None
        if self._on_gpu and self._timed:
            device = next(iter(stages.values())).device
            device.synchronize()
            self._base = device.timing_mark()
        self._base_s = time.perf_counter()

    def execute_all(self, program: Iterable[Instruction]) -> None:
        """Execute a whole program; stop early if another rank has failed."""
        execute = self.execute if self._timed or self._on_gpu else self._execute
        run = self._run
        for instruction in program:
            if run.failure is not None:
                raise Stopped
            execute(instruction)

    def execute(self, instruction: Instruction) -> None:
        """Execute one instruction on its stage's stream, and note when, if the run is traced."""
        if not self._on_gpu:
            start_s = time.perf_counter()
            self._execute(instruction)
            if self._timed:
                self._times_s += (start_s, time.perf_counter())
            return
        device = self._stages[instruction.stage].device
        with device.computing():
            start = device.timing_mark() if self._timed else None
            self._execute(instruction)
            end = device.timing_mark() if self._timed else None
            if start is not None and end is not None:
                self._gpu_marks.append((start, end))

    def _execute(self, instruction: Instruction) -> None:  # noqa: C901 - one flat match
        stage, run = self._stages[instruction.stage], self._run
        match instruction:
            case Forward(_, i, keep_graph):
                stage.forward(run, i, keep_graph)
            case Recompute(_, i):
                stage.recompute(run, i)
            case Backward(_, i):
                stage.backward(run, i)
            case ReceiveActivation(s, i, peer):
                activation = self._channels.receive((False, peer, s, i), instruction)
                run.arrived[s, i][peer] = stage.bring_activation(activation)
            case ReceiveGradient(s, i, peer):
                gradient = self._channels.receive((True, peer, s, i), instruction)
                run.arrived_gradients[s, i][peer] = gradient
            case SendActivation(s, i, peer):
                self._channels.send((False, s, peer, i), run.leaving[s, i].pop(peer))
            case SendGradient(s, i, peer):
                self._channels.send((True, s, peer, i), run.leaving_gradients[s, i].pop(peer))
            case CommitStatistics():
                stage.commit_statistics(run)
            case _:
                assert_never(instruction)

    def finish(self) -> None:
        """Hand the noted times over to the run; call once the rank is done."""
        for start, end in self._gpu_marks:
            if self._base is not None:
                end.synchronize()
                self._times_s.append(self._base_s + self._base.elapsed_time(start) / 1e3)
                self._times_s.append(self._base_s + self._base.elapsed_time(end) / 1e3)
        if self._timed:
            self._run.times_s[self._rank] = self._times_s
