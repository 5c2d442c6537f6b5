"""The batches that an asynchronous schedule runs together."""

from collections.abc import Iterator

from .tasks.task import Batch


class Windows:
    """Takes batches `length` at a time; one that is not full stands alone."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._waiting: list[Batch] = []

    def take(self, batches: Iterator[Batch]) -> list[Batch]:
        """Return the next batches of an epoch that has some left."""
        found = [self._waiting.pop() if self._waiting else next(batches)]
        while len(found) < self._length and found[-1].is_full:
            batch = next(batches, None)
            if batch is None:
                break
            if not batch.is_full:
                self._waiting.append(batch)
                break
            found.append(batch)
        return found
