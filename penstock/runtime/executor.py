"""The executor: the only interpreter of schedules that touches tensors."""

import time
from collections.abc import Iterable, Mapping
from typing import assert_never

from penstock.schedules.ir import (
    Backward,
    CommitStatistics,
    Forward,
    Instruction,
    PostReceive,
    ReceiveActivation,
    ReceiveGradient,
    Recompute,
    ReduceGradients,
    SendActivation,
    SendGradient,
)
from penstock.types import Trace

from .channels import AbstractChannels, Stopped
from .clock import Clock
from .run import Run
from .stage import Stage


class Executor:
    """Executes the instructions of one rank, in order, on its stages."""

    def __init__(
        self,
        rank: int,
        program: Iterable[Instruction],
        stages: Mapping[int, Stage],
        run: Run,
        channels: AbstractChannels,
    ) -> None:
        self._rank = rank
        self._program = program
        self._stages = {i.stage: stages[i.stage] for i in program}
        self._run = run
        self._channels = channels
        self._on_gpu = any(stage.device.is_cuda for stage in self._stages.values())
        self._timed = run.trace is not Trace.OFF
        self._times_s: list[float] = []
        self._clock = Clock(s.device for s in self._stages.values()) if self._timed else None

    def execute_all(self) -> None:
        """Execute the whole program; stop early if another rank has failed."""
        execute = self.execute if self._timed or self._on_gpu else self._execute
        run = self._run
        for instruction in self._program:
            if run.failure is not None:
                raise Stopped
            execute(instruction)

    def execute(self, instruction: Instruction) -> None:
        """Execute one instruction on its stage's stream, and note when, if the run is traced."""
        device = self._stages[instruction.stage].device
        if self._clock is None:
            with device.computing():
                self._execute(instruction)
        elif not self._on_gpu:
            start_s = time.perf_counter()
            self._execute(instruction)
            self._times_s += (start_s, time.perf_counter())
        else:
            with device.computing():
                self._clock.mark(device)
                self._execute(instruction)
                self._clock.mark(device)

    def _execute(self, instruction: Instruction) -> None:  # noqa: C901, PLR0912 - one flat match
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
            case PostReceive(s, i, peer, gradient):
                self._channels.post((gradient, peer, s, i))
            case CommitStatistics():
                stage.commit_statistics(run)
            case ReduceGradients():
                stage.reduce_gradients(run)
            case _:
                assert_never(instruction)

    def finish(self) -> None:
        """Hand the noted times over to the run; call once the rank is done."""
        if self._clock is not None:
            self._run.times_s[self._rank] = self._times_s or self._clock.times_s()
