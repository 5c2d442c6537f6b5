"""What a process says to the others along an axis; says nothing to nobody where it is alone.

All processes of a group make the same calls in the same order.  `what` completes the message
"rank 1 (stage 1) waited ...".
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from .plain_data import PLAIN, Codec

Row = Sequence[float]


class AbstractGroup(ABC):
    """The processes along an axis; `rank` is this one's number among the `size` of them.

    `num_pipelines` counts those that were made so far.

    Raises:
        PeerError: by every call: another process failed, or is gone.
        WaitTimeout: by every call: the others do not come to it within the deadline.
    """

    rank: int
    size: int
    num_pipelines: int

    @abstractmethod
    def reporting(self, names: Sequence[str] = ()) -> AbstractContextManager[None]:
        """Tell all processes of whatever is raised inside, so that none waits for this one.

        `names` say what each rank runs, for messages.
        """

    @abstractmethod
    def gather(self, value: Any, what: str, codec: Codec = PLAIN) -> list[Any]:
        """Return the values of all, in the order of ranks."""

    @abstractmethod
    def broadcast(self, value: Any, source: int, what: str, codec: Codec = PLAIN) -> Any:
        """Return the value that rank `source` gives."""

    @abstractmethod
    def number_pipeline(self, what: str) -> int:
        """Number a pipeline that all have made alike; `what` describes it in messages.

        Calls name it by this number, so that those for one pipeline never meet those for another.
        """

    @abstractmethod
    def exchange(self, kind: str, pipeline: int, row: Row) -> list[Row]:
        """Begin a call together with all others: one of `agreement.CALLS`, for one pipeline.

        Returns:
            The rows of all, in the order of ranks.

        Raises:
            MeshError: they begin different kinds of calls, or for different pipelines.
        """

    @abstractmethod
    def require_same(self, where: str, facts: dict[str, Any]) -> None:
        """Compare what all were given.

        Raises:
            ConfigError: on every process alike; names the first that differs, with each value.
        """

    @abstractmethod
    def highest(self, value: int, what: str) -> int:
        """Return the highest of all values; a cheaper `gather`."""

    @abstractmethod
    def work(self, job: Callable[[], Any], what: str) -> Any:
        """Run a job in every process that may take long, and return when all have ended theirs.

        No deadline runs on it: those that have ended theirs ask the others time and again whether
        they are still at work, in exchanges that are short.  What a job raises is raised when all
        have ended.
        """

    @abstractmethod
    def from_first(self, job: Callable[[], Any], what: str) -> Any:
        """Run a job that may take long on rank 0 only; return its result on all processes, or
        raise its error on all.

        Raises:
            PenstockError: what `job` raised.
            PeerError: on the others, where it raised something else.
        """

    @abstractmethod
    def copy_from(self, source: int, tensor: Tensor, what: str) -> None:
        """Overwrite a contiguous tensor by the values that it has on rank `source`."""

    @abstractmethod
    def stack(self, tensor: Tensor, what: str) -> list[Tensor]:
        """Return the tensors of all, which are alike, in the order of ranks."""

    @abstractmethod
    def sum(self, tensor: Tensor, what: str) -> None:
        """Put the sum of all into `tensor`."""

    @abstractmethod
    def sum_scalars(self, scalar: Tensor | None, what: str) -> Tensor:
        """Return the sum of the scalars of those that have one, in their type."""

    @abstractmethod
    def begin_sum(self, tensor: Tensor) -> Any:
        """Begin to put the sum of all into `tensor`; returns what `finish` is given."""

    @abstractmethod
    def finish(self, begun: Sequence[Any], what: str) -> None:
        """Wait for sums that were begun."""

    def begin_call(self, kind: str, pipeline: int) -> None:
        """Compare that all make a call of this kind, for one pipeline.

        Raises:
            MeshError: they do not.
        """
        with self.reporting():
            self.exchange(kind, pipeline, ())

    def barrier(self, what: str) -> None:
        """Return when all have come here."""
        self.highest(0, what)


class Alone(AbstractGroup):
    """A process that is the only one along an axis."""

    rank, size, num_pipelines = 0, 1, 0

    def reporting(self, names: Sequence[str] = ()) -> AbstractContextManager[None]:
        return nullcontext()

    def gather(self, value: Any, what: str, codec: Codec = PLAIN) -> list[Any]:
        return [value]

    def broadcast(self, value: Any, source: int, what: str, codec: Codec = PLAIN) -> Any:
        return value

    def number_pipeline(self, what: str) -> int:
        return 0

    def exchange(self, kind: str, pipeline: int, row: Row) -> list[Row]:
        return [row]

    def require_same(self, where: str, facts: dict[str, Any]) -> None:
        pass

    def highest(self, value: int, what: str) -> int:
        return value

    def work(self, job: Callable[[], Any], what: str) -> Any:
        return job()

    def from_first(self, job: Callable[[], Any], what: str) -> Any:
        return job()

    def copy_from(self, source: int, tensor: Tensor, what: str) -> None:
        pass

    def stack(self, tensor: Tensor, what: str) -> list[Tensor]:
        return [tensor]

    def sum(self, tensor: Tensor, what: str) -> None:
        pass

    def sum_scalars(self, scalar: Tensor | None, what: str) -> Tensor:
        assert scalar is not None
        return scalar

    def begin_sum(self, tensor: Tensor) -> Any:
        return None

    def finish(self, begun: Sequence[Any], what: str) -> None:
        pass
