"""End this process when its launcher is gone: nobody would end it, and its peers may never come.

A launcher is torchrun, also as `--num-processes` runs it.  What was started by hand stays when its
shell goes, and so does what a wrapper started.  In doubt nothing is ended: what waits in vain ends
at its deadline.
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
_LOOK_EVERY_S = 1.0
_SIGN = "TORCHELASTIC_ERROR_FILE"
"""What torchrun tells each process, each time another value, and nobody sets by hand."""
_NO_CONTAINER = "pid:[4026531836]"
"""The processes of the host itself, as Linux numbers these namespaces."""


@cache
def end_with_launcher() -> None:
    """Let this process end when its launcher does, however that ends; at once if it is gone."""
    if not {_SIGN, "RANK"} <= os.environ.keys() or os.getsid(0) != os.getpid():
        return  # torchrun gives each process that it starts a session of its own
    parent = os.getppid()
    is_launcher = _is_launcher(parent)
    if is_launcher is None:
        return
    if not is_launcher:
        _end()
    if not _ask_for_signal():
        threading.Thread(target=_look, args=(parent,), name="launcher", daemon=True).start()
    if os.getppid() != parent:  # it went before it was asked for
        _end()


def _is_launcher(parent: int) -> bool | None:
    """Tell whether this is torchrun, or False if it took this process over; None if in doubt."""
    try:
        environment = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
        runs_python = b"python" in Path(f"/proc/{parent}/maps").read_bytes()
    except OSError:  # another user's, or no such files here
        if sys.platform != "linux":
            return parent != 1
        is_host = os.path.realpath("/proc/self/ns/pid").endswith(_NO_CONTAINER)
        return False if parent == 1 and is_host else None
    if f"{_SIGN}={os.environ[_SIGN]}".encode() in environment:
        return None  # a wrapper that torchrun has started, or a process that did so itself
    return runs_python


def _ask_for_signal() -> bool:
    """Ask the system to kill this process when its parent ends; tells whether it will.

    It does so when the thread ends that started this process: torchrun's own, which stays.
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
    with suppress(Exception):  # whoever reads may be gone, too
        sys.stderr.write("penstock: what launched this process is gone; it ends\n")
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(1)
