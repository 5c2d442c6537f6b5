"""Threads that may be left behind in a wait that never ends, and how a process ends despite them.

Such a thread would crash the interpreter if it woke while that goes down.
"""

import logging
import os
import sys
import threading

THREAD_PREFIX = "penstock-mesh-"
"""How the names of threads begin that wait for other processes."""


def is_any_left() -> bool:
    """Tell whether a thread still waits for another process."""
    return any(t.name.startswith(THREAD_PREFIX) for t in threading.enumerate())


def end_now(code: int) -> None:
    """End the process with `code`, without waiting for its threads."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
