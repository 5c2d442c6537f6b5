"""Apply each deliberate fault to a copy of the repository and see that its test fails.

    python -m scripts.deliberate_faults            every fault, as a table
    python -m scripts.deliberate_faults WORD ...   those whose names hold all these words

A fault that no test catches, or that no longer fits the code, ends the script with an error.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from . import (
    asynchronous,
    captured,
    foresight,
    memory,
    messages,
    one_process,
    processes,
    runs,
    sharding,
)
from .fault import catches

ROOT = Path(__file__).parents[2]
FAULTS = (
    *one_process.FAULTS,
    *processes.FAULTS,
    *captured.FAULTS,
    *runs.FAULTS,
    *asynchronous.FAULTS,
    *memory.FAULTS,
    *messages.FAULTS,
    *foresight.FAULTS,
    *sharding.FAULTS,
)


def main() -> None:
    """Try every fault; print the table; fail if one went unnoticed."""
    unnoticed = []
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / "penstock"
        shutil.copytree(ROOT, repository, ignore=shutil.ignore_patterns(".git", ".venv", "runs"))
        for fault in FAULTS:
            if not all(word in fault.name for word in sys.argv[1:]):
                continue
            caught = catches(fault, repository)
            test = fault.test + (f" ({fault.only})" if fault.only else "")
            print(f"| {fault.name} | `{fault.file}` | `{test}` |{'' if caught else '  UNNOTICED'}")
            if not caught:
                unnoticed.append(fault.name)
    if unnoticed:
        sys.exit("no test noticed: " + "; ".join(unnoticed))


if __name__ == "__main__":
    main()
