"""Threads that may be left behind in a wait that never ends, and how a process ends despite them.

Such a thread would crash the interpreter if it woke while that goes down.
"""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

THREAD_PREFIX = "penstock-mesh-"
"""How the names of threads begin that wait for other processes, or were given up."""


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


def is_any_left() -> bool:
    """Tell whether a thread is left that would crash the interpreter if it woke at its end."""
    return any(t.name.startswith(THREAD_PREFIX) for t in threading.enumerate())


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
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
