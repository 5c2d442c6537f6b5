"""What a transport is: it moves values between stages, and drives the ranks of one process."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.runtime.caller import CallerContext
from penstock.runtime.run import Run
from penstock.runtime.stage import Stage
from penstock.schedules.ir import Schedule


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
