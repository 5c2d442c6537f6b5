"""Threads that may be left behind in a wait that never ends, and how a process ends despite them.

Such a thread would crash the interpreter if it woke while that goes down.
"""

import atexit
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

THREAD_PREFIX = "penstock-mesh-"
"""How the names of threads begin that wait for other processes, or were given up."""
_FAILED = threading.Event()


def in_thread(job: Callable[[], None], name: str, *, daemon: bool) -> "Future[None]":
    """Run a job in a thread of its own; the process waits for it to end, unless it is `daemon`."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            job()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return outcome


def note_failure() -> None:
    """Note that a process has failed: torch may wait for it when it destroys connections."""
    _FAILED.set()


def must_end_now() -> bool:
    """Tell whether this process could hang or crash while the interpreter goes down."""
    return _FAILED.is_set() or any(t.name.startswith(THREAD_PREFIX) for t in threading.enumerate())


def never_destroy(*things: Any) -> None:
    """Keep `things`, also while the interpreter goes down."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(things))


@atexit.register  # once imported, so that what a script registers later runs before
def _end_after_failure() -> None:
    """End now if an error ends the script, which gives the exit code, and a process has failed."""
    raised = getattr(sys, "last_value", None)
    if _FAILED.is_set() and raised is not None:
        end_now(128 + signal.SIGINT if isinstance(raised, KeyboardInterrupt) else 1)


def leave_behind(threads: Iterable[threading.Thread]) -> None:
    """Let the process end despite those of `threads` that are stuck in a layer; then not well."""
    stuck = [thread for thread in threads if thread.is_alive()]
    for thread in stuck:
        thread.name = f"{THREAD_PREFIX}{thread.name}"
    if stuck:
        atexit.register(_end_despite, stuck)


def _end_despite(threads: Sequence[threading.Thread]) -> None:
    if any(thread.is_alive() for thread in threads):
        end_now(1)


def end_now(code: int) -> None:
    """End the process with `code`, without waiting for its threads."""
    for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        with suppress(Exception):  # whoever reads may be gone
            flush()
    os._exit(code)
