"""Whose turn it is to use the stages of a pipeline: one call's, or nobody's."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.errors import PenstockError


class Turn:
    """One call's, or nobody's; only of one process.

    That is the one which uses them first, or which other processes are connected with.
    """

    def __init__(self, *, is_connected: bool = False) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid() if is_connected else None
        self._in_backward = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Turn, ()  # a copied pipeline runs on its own

    @contextmanager
    def taken(self, *, backward: bool) -> Iterator[None]:
        """Let the caller have it; `backward`: for the backward of an earlier call.

        Raises:
            PenstockError: somebody has it, or this process was forked from the one that uses it.
        """
        here = os.getpid()
        self._process = self._process or here
        if here != self._process:
            raise PenstockError(
                f"this pipeline was used in process {self._process}, and this is process {here}, "
                "forked from it: the threads that run the stages are not here, so that a step "
                "would wait for ever. Make the pipeline in this process, or start it by "
                'multiprocessing.get_context("spawn")'
            )
        if not self._lock.acquire(blocking=False):
            raise _busy(in_backward=self._in_backward)
        self._in_backward = backward
        try:
            yield
        finally:
            self._lock.release()


def _busy(*, in_backward: bool) -> PenstockError:
    if in_backward:
        return PenstockError(
            "this pipeline was called while the backward of an earlier call runs. A "
            "torch.utils.checkpoint around the pipeline does that: what a stage saved is to be "
            "computed again, and the stages are busy. Leave it out and use "
            "recompute=Recompute.STAGE, which saves as much; or give checkpoint "
            "use_reentrant=True. A hook that calls the pipeline does it too: call it later"
        )
    return PenstockError(
        "this pipeline is running already: it was called from another thread, or from "
        "inside one of its own layers, losses or hooks. Its stages do one step at a time; "
        "let the first call end, or use a second pipeline (copy.deepcopy)"
    )
