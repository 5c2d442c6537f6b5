"""What a deliberate fault is, and whether a test catches it."""

import os
import subprocess
import sys
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


def catches(fault: Fault, repository: Path) -> bool:
    """Apply a fault in `repository`, run its test, undo it; tell whether the test failed."""
    path = repository / fault.file
    text = path.read_text()
    if fault.right not in text:
        sys.exit(f"{fault.name}: {fault.file} no longer holds {fault.right!r}; update the fault")
    path.write_text(text.replace(fault.right, fault.wrong, 1))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", fault.test]
    command += ["--timeout", "60", "-m", "slow or not slow"]
    command += ["-k", fault.only] if fault.only else []
    try:
        finished = subprocess.run(
            command,
            cwd=repository,
            env={**os.environ, "PYTHONPATH": str(repository)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(text)
    return finished.returncode == 1 or "Timeout" in finished.stdout
