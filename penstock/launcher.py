"""End this process when its launcher is gone: nobody would end it, and its peers may never come.

A launcher is torchrun, also as `--num-processes` runs it.  What was started by hand stays when its
shell goes.
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


@cache
def end_with_launcher() -> None:
    """Let this process end when its launcher does, however that ends; at once if it is gone."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.getsid(0) != os.getpid():
        return  # torchrun gives each process that it starts a session of its own
    parent = os.getppid()
    if _is_adopted(parent):
        _end()
    if not _ask_for_signal():
        threading.Thread(target=_look, args=(parent,), name="launcher", daemon=True).start()
    if os.getppid() != parent:  # it went before it was asked for
        _end()


def _is_adopted(parent: int) -> bool:
    """Tell whether the parent is none that runs torch: it took this process over."""
    try:
        return b"libtorch" not in Path(f"/proc/{parent}/maps").read_bytes()
    except OSError:  # another user's, or no such files here
        return parent == 1


def _ask_for_signal() -> bool:
    """Ask the system to kill this process when its parent ends; tells whether it will."""
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
