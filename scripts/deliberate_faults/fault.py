"""What a deliberate fault is, and whether a test catches it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fault:
    """Replace `right` by `wrong` in `file`; `test` (cases that match `only`) must then fail."""

    name: str
    file: str
    right: str
    wrong: str
    test: str
    only: str = ""


CAUGHT = "caught"


def outcome(fault: Fault, repository: Path) -> str:
    """Apply a fault in `repository`, run its test, undo it; say what became of it: `CAUGHT`, that
    its place or its test is gone, or that no test noticed.
    """
    path = repository / fault.file
    text = path.read_text()
    if text.count(fault.right) != 1:
        return f"ITS PLACE is there {text.count(fault.right)} times"
    path.write_text(text.replace(fault.right, fault.wrong))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", fault.test]
    command += ["--timeout", "60", "-m", "slow or not slow"]
    command += ["-k", fault.only] if fault.only else []
    try:
        with subprocess.Popen(
            command,
            cwd=repository,
            env={**os.environ, "PYTHONPATH": f"{repository}{os.pathsep}{repository / 'recipes'}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as run:
            said, _ = run.communicate()
    finally:
        path.write_text(text)
        with suppress(ProcessLookupError):  # what hangs, as the fault has it, and was not ended
            os.killpg(run.pid, signal.SIGKILL)
    if run.returncode == 1 or "Timeout" in said:
        return CAUGHT
    return "UNNOTICED" if run.returncode == 0 else f"ITS TEST is gone (pytest: {run.returncode})"
