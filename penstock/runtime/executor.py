"""Execute the instructions of a rank: the only interpreter of schedules with tensors."""

import time
from collections.abc import Iterable, Mapping
from typing import assert_never

from penstock.schedules.ir import (
    Backward,
    BackwardInput,
    BackwardWeight,
    CommitStatistics,
    Fetch,
    Forward,
    Instruction,
    Message,
    Offload,
    PostReceive,
    ReceiveActivation,
    ReceiveGradient,
    Recompute,
    ReduceGradients,
    SendActivation,
    SendGradient,
    UpdateWeights,
)
from penstock.transport.channels import AbstractChannels, Activation, Gradient, Stopped
from penstock.types import Trace

from .devices import Clock
from .memory.kept_bytes import note_out_of_memory
from .run import Run
from .stage.stage import Stage


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
        self._timed = run.batch.trace is not Trace.OFF
        self._times_s: list[float] = []
        self._sent_bytes: list[int] = []
        self._lasted: set[tuple[tuple[bool, int, int], int, int]] = set()
        self._clock = Clock(s.device for s in self._stages.values()) if self._timed else None

    def execute_all(self) -> None:
        """Execute the whole program; stop early if another rank has failed."""
        execute = self.execute if self._timed or self._on_gpu else self._execute
        run = self._run
        for instruction in self._program:
            if run.failure is not None:
                raise Stopped
            try:
                execute(instruction)
            except RuntimeError as error:
                note_out_of_memory(error, instruction, run)
                raise

    def execute(self, instruction: Instruction) -> None:
        """Execute one instruction on its stage's stream; record its times if the run is traced."""
        if self._clock is None and not self._on_gpu:
            self._execute(instruction)
        elif self._on_gpu:
            device = self._stages[instruction.stage].device
            with device.computing():
                if self._clock is not None:
                    self._clock.mark(device)
                self._execute(instruction)
                if self._clock is not None:
                    self._clock.mark(device)
        else:
            start_s = time.perf_counter()
            self._execute(instruction)
            self._times_s += (start_s, time.perf_counter())

    def _execute(self, instruction: Instruction) -> None:  # noqa: C901, PLR0912 - one flat match
        stage, run = self._stages[instruction.stage], self._run
        match instruction:
            case Forward(_, i, keep_graph, version):
                stage.forward(run, i, keep_graph, version)
            case Recompute(_, i):
                stage.recompute(run, i)
            case Backward(_, i):
                stage.backward(run, i)
            case BackwardInput(_, i):
                stage.backward_input(run, i)
            case BackwardWeight(_, i):
                stage.backward_weight(run, i)
            # Messages: the edge's direction is (is a gradient, from stage, to stage).
            case ReceiveActivation(s, i, peer):
                activation = self._channels.receive((False, peer, s, i), instruction)
                run.stages[s].arrived[i, peer] = stage.handover.bring_activation(activation)
            case ReceiveGradient(s, i, peer):
                gradient = self._channels.receive((True, peer, s, i), instruction)
                run.stages[s].arrived_gradients[i, peer] = gradient
            case SendActivation(s, i, peer):
                self._send((False, s, peer, i), run.stages[s].leaving.pop((i, peer)))
            case SendGradient(s, i, peer):
                self._send((True, s, peer, i), run.stages[s].leaving_gradients.pop((i, peer)))
            case PostReceive(s, i, peer, gradient):
                self._channels.post((gradient, peer, s, i))
            # Once per mini-batch, and memory.
            case CommitStatistics():
                stage.commit_statistics(run)
            case ReduceGradients():
                stage.reduce_gradients(run)
            case Offload(_, i):
                stage.offload(run, i)
            case Fetch(_, i):
                stage.fetch(run, i)
            case UpdateWeights():
                stage.update_weights(run)
            case _:
                assert_never(instruction)

    def _send(self, message: Message, payload: Activation | Gradient) -> None:
        if self._timed:
            self._sent_bytes.append(self._new_bytes(message[:3], payload))
        self._channels.send(message, payload)

    def _new_bytes(self, edge: tuple[bool, int, int], payload: Activation | Gradient) -> int:
        """Return the payload's bytes; a weight that lasts for the run counts once per edge."""
        total = 0
        lasting = payload.lasting if isinstance(payload, Activation) else frozenset()
        for place, leaf in enumerate(payload.leaves):
            if place in lasting:
                key = (edge, place, len(payload.leaves))
                if key in self._lasted:
                    continue
                self._lasted.add(key)
            total += 0 if leaf is None else leaf.numel() * leaf.element_size()
        return total

    def finish(self) -> None:
        """Hand the recorded times over to the run, once the rank is done."""
        if self._clock is not None:
            self._run.recorded.sent_bytes[self._rank] = self._sent_bytes
            self._run.recorded.times_s[self._rank] = self._times_s or self._clock.times_s()
