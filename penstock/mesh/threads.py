"""Threads that may stay in a wait that never ends, and the end of a process despite them.

Such a thread would crash the interpreter if it woke during its shutdown.
"""

import atexit
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

THREAD_PREFIX = "penstock-mesh-"
"""Prefix of the names of threads that wait for other processes, or were given up."""
_FAILED = threading.Event()
"""Set once any process of the job has failed."""


def in_thread(job: Callable[[], None], name: str, *, daemon: bool) -> "Future[None]":
    """Run a job in a new thread; the interpreter waits for it at exit, unless it is `daemon`."""
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
    """Return True if the shutdown of the interpreter could hang or crash."""
    return _FAILED.is_set() or any(t.name.startswith(THREAD_PREFIX) for t in threading.enumerate())


def never_destroy(*things: Any) -> None:
    """Keep `things` alive, also during the shutdown of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(things))


@atexit.register  # once imported, so that what a script registers later runs before
def _end_after_failure() -> None:
    """End at once if a process has failed and an error ends the script; keep its exit code."""
    raised = getattr(sys, "last_value", None)
    if _FAILED.is_set() and raised is not None:
        end_now(128 + signal.SIGINT if isinstance(raised, KeyboardInterrupt) else 1)


def leave_behind(threads: Iterable[threading.Thread]) -> None:
    """Let the process end, with code 1, even if some of `threads` are stuck in a layer."""
    stuck = [thread for thread in threads if thread.is_alive()]
    for thread in stuck:
        thread.name = f"{THREAD_PREFIX}{thread.name}"

    def end_despite() -> None:
        if any(thread.is_alive() for thread in stuck):
            end_now(1)

    if stuck:
        atexit.register(end_despite)


def end_now(code: int) -> None:
    """End the process with `code`, without waiting for its threads."""
    for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        with suppress(Exception):  # whoever reads may be gone
            flush()
    os._exit(code)
