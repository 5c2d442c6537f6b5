"""What an executor sends to and receives from; each transport has its own kind."""

from abc import ABC, abstractmethod
from typing import Any

from penstock.schedules.ir import Instruction, Message


class AbstractChannels(ABC):
    """The messages of one run.  Both sides name a message by the same four values."""

    def post(self, message: Message) -> None:  # noqa: B027 - nothing to do is the usual answer
        """Get ready for `message`, which will be received soon."""

    @abstractmethod
    def send(self, message: Message, payload: Any) -> None:
        """Hand `payload` over; never waits."""

    @abstractmethod
    def receive(self, message: Message, instruction: Instruction) -> Any:
        """Return the payload of `message`, waiting for it until the deadline.

        Raises:
            WaitTimeout: it did not come in time.
            Stopped: another rank failed.
        """


class Stopped(BaseException):
    """Ends a rank whose peer has failed; never leaves a transport."""


class LoopbackChannels(AbstractChannels):
    """A message waits in a dict; the walk never asks for one before it was sent."""

    def __init__(self) -> None:
        self._payloads: dict[Message, Any] = {}

    def send(self, message: Message, payload: Any) -> None:
        self._payloads[message] = payload

    def receive(self, message: Message, instruction: Instruction) -> Any:
        return self._payloads.pop(message)
