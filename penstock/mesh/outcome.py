"""What came of a job, to be told to other processes: its result, or the error that it raised."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import PeerError, PenstockError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job returned, or raised in this process."""

    value: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        """Return what the job returned, or raise what it raised."""
        if self.error is not None:
            raise self.error
        return self.value

    def told(self) -> tuple[str, Any]:
        """Return it as plain data: the class of the error, "" for none, and what it says."""
        if self.error is None:
            return "", self.value
        text = str(self.error)
        notes = [text, *getattr(self.error, "__notes__", [])]
        return type(self.error).__name__, notes


def outcome_of(job: Callable[[], Any]) -> Outcome:
    """Run a job and keep what came of it."""
    try:
        return Outcome(job())
    except Exception as error:
        return Outcome(error=error)


def result_of(told: tuple[str, Any], teller: str) -> Any:
    """Return the result that another process told of, or raise its error.

    Raises:
        PenstockError: the job raised one like this there.
        PeerError: it raised something else.
    """
    name, said = told
    if not name:
        return said
    text, *notes = said
    kind = vars(sys.modules[PenstockError.__module__]).get(name)
    if not (isinstance(kind, type) and issubclass(kind, PenstockError)):
        raise PeerError(
            f"{teller} failed: {'; '.join([f'{name}: {text}', *notes])}", complete=True
        )
    error = kind.__new__(kind)
    error.args = (text,)
    error.__notes__ = notes
    raise error
