"""Loop-back: all ranks in the calling thread, instruction by instruction, as `walk` orders."""

from typing import Any

import torch

from penstock.runtime.channels import AbstractChannels
from penstock.runtime.executor import Executor
from penstock.schedules.ir import Instruction
from penstock.schedules.walk import Message, walk

from .base import AbstractTransport, Work


class _Slots(AbstractChannels):
    """A message waits in a dict; the walk never asks for one before it was sent."""

    def __init__(self) -> None:
        self._payloads: dict[Message, Any] = {}

    def send(self, message: Message, payload: Any) -> None:
        self._payloads[message] = payload

    def receive(self, message: Message, instruction: Instruction) -> Any:
        return self._payloads.pop(message)


class LoopbackTransport(AbstractTransport):
    """Runs a pipeline without threads: the same results, in an order that never changes."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def drive(self, work: Work) -> None:
        channels = _Slots()
        executors = [
            Executor(rank, program, work.stages, work.run, channels)
            for rank, program in enumerate(work.schedule.programs)
        ]
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            with work.caller.entered():
                for rank, instruction in walk(work.schedule):
                    executors[rank].execute(instruction)
        finally:
            torch.set_num_threads(num_threads)
        for executor in executors:
            executor.finish()

    def close(self) -> None:
        """Nothing is held."""
