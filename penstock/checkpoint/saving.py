"""A save that is under way beside the training."""

from collections.abc import Callable
from pathlib import Path


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, path: Path, wait: Callable[[], None]) -> None:
        self.path = path
        """The folder, once it is there."""
        self._wait: Callable[[], None] | None = wait
        self._error: Exception | None = None

    def wait(self) -> None:
        """Return when the folder is there, however long it takes.

        Raises:
            CheckpointError: it cannot be written; nothing is left of it.
            PeerError: another process failed meanwhile.
            WaitTimeout: another process does not answer within the mesh's deadline.
        """
        if self._error is not None:
            raise self._error
        if self._wait is None:
            return
        try:
            self._wait()
        except Exception as error:  # an interrupt is no outcome
            self._error = error
            raise
        self._wait = None
