"""End this process once its launcher is gone: no other program would, and peers may never come.

A launcher is torchrun, also the one that `--num-processes` starts.  A process stays if it was
started by hand or by a wrapper and that parent goes.  In doubt a process stays: its waits end at
their deadline.  The module needs no torch, so that a command ends in time while torch is imported.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_PR_SET_PDEATHSIG = 1
"""Linux' prctl that asks for a signal at the parent's end."""
_LOOK_EVERY_S = 1.0
"""Seconds between two looks at the parent, without that signal."""
_SIGN = "TORCHELASTIC_ERROR_FILE"
"""A variable that torchrun sets to another value in each process; nobody sets it by hand."""
_NO_CONTAINER = "pid:[4026531836]"
"""Linux' name for the process namespace of the host itself."""


@cache
def end_with_launcher() -> None:
    """End this process when its launcher ends, for any reason; at once if it is gone."""
    if not {_SIGN, "RANK"} <= os.environ.keys() or os.getsid(0) != os.getpid():
        return  # torchrun starts each process in a new session
    parent = os.getppid()
    is_launcher = _is_launcher(parent)
    if is_launcher is None:
        return
    if not is_launcher:
        _end()
    if not _ask_for_signal():
        threading.Thread(target=_look, args=(parent,), name="launcher", daemon=True).start()
    if os.getppid() != parent:  # it ended before the signal was set
        _end()


def _is_launcher(parent: int) -> bool | None:
    """Return True for torchrun, False if init has replaced it, None in doubt."""
    try:
        environment = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
        runs_python = b"python" in Path(f"/proc/{parent}/maps").read_bytes()
    except OSError:  # another user's process, or not Linux
        if sys.platform != "linux":
            return parent != 1
        is_host = os.path.realpath("/proc/self/ns/pid").endswith(_NO_CONTAINER)
        return False if parent == 1 and is_host else None
    if f"{_SIGN}={os.environ[_SIGN]}".encode() in environment:
        return None  # the parent is a wrapper under torchrun
    return runs_python


def _ask_for_signal() -> bool:
    """Ask the system to kill this process when its parent ends; return True if it will.

    The signal comes when the thread ends that started this process: torchrun's main thread.
    """
    if sys.platform != "linux":
        return False
    answer: int = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return answer == 0


def _look(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    _end()


def _end() -> None:
    with suppress(Exception):  # the reader may be gone, too
        sys.stderr.write("penstock: what launched this process is gone; it ends\n")
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(1)
