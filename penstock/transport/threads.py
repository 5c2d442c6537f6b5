"""Threads of one process: values are handed over in memory, without a copy."""

from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Any

from penstock.errors import WaitTimeout
from penstock.schedules.ir import Instruction, Message
from penstock.schedules.transfers import Transfers

from .channels import AbstractChannels, Stopped

_ABORT = object()


class QueueChannels(AbstractChannels):
    """One queue per direction of an edge; messages leave it in the order they were sent.

    `turns` are held by ranks that run, and given back while they wait: no more ranks run at once
    than the cores can carry, for Python's lock makes many that do slower than a few.
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
            what = "gradient" if is_gradient else "activation"
            raise WaitTimeout(
                f"stage {target} waited {self._timeout_s:g} s at "
                f"{instruction} for the {what} of micro-batch {microbatch} "
                f"from stage {source}, which did not send it. If one layer may take that long, "
                "raise timeout_s"
            ) from None
        finally:
            self.turns.__enter__()

    def abort(self) -> None:
        """Wake every rank that waits."""
        for queue in self._queues.values():
            queue.put(_ABORT)
