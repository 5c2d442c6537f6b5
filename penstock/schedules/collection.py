"""Pause Python's collector of reference cycles while very many small values are made."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Stop the collector for a block whose values hold no cycles: it would find nothing.

    It would visit every value again and again, for a third of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
