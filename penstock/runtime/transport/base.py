"""What a transport is: it moves values between stages, and drives the ranks of one process."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.runtime.caller import CallerContext
from penstock.runtime.run import Run
from penstock.runtime.stage import Stage
from penstock.schedules.ir import Instruction, Schedule
from penstock.schedules.walk import Message


class AbstractChannels(ABC):
    """The messages of one run.  Both sides name a message by the same four values."""

    def post(self, message: Message) -> None:  # noqa: B027 - nothing to do is the usual answer
        """Get ready for `message`, which will be received soon."""

    @abstractmethod
    def send(self, message: Message, payload: Any) -> None:
        """Hand `payload` over; never waits."""

    @abstractmethod
    def receive(self, message: Message, instruction: Instruction) -> Any:
        """Give the payload of `message`, waiting for it until the deadline.

        Raises:
            WaitTimeout: it did not come in time.
            Stopped: another rank failed.
        """


@dataclass(frozen=True, slots=True)
class Work:
    """One run to drive: the lowered schedule, the stages by number, the caller's modes."""

    schedule: Schedule
    stages: Mapping[int, Stage]
    run: Run
    caller: CallerContext


class AbstractTransport(ABC):
    """Runs a lowered schedule to its end."""

    @abstractmethod
    def drive(self, work: Work) -> None:
        """Execute every program; return when all ranks are done.

        Raises:
            Exception: the first one that any rank raised, as itself, with the place noted.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds; it can be used again and then takes hold anew."""


class Stopped(BaseException):
    """Ends a rank whose peer has failed; never leaves a transport."""
