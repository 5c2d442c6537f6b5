"""Apply each deliberate fault to a copy of the repository and see that its test fails.

    python -m scripts.deliberate_faults            every fault, as a table
    python -m scripts.deliberate_faults WORD ...   those whose names hold all these words
    python -m scripts.deliberate_faults --part 3/10   the fourth tenth, each tenth from 0 to 9

A fault that its test does not catch, or whose place or test is gone, is an error in the end.
"""

import argparse
import shutil
import sys
import tempfile
import time
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
    streams,
)
from .fault import CAUGHT, Fault, outcome

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
    *streams.FAULTS,
)


def chosen(words: list[str], part: str) -> list[Fault]:
    """Return the faults whose names hold all words, or one part of those: every n-th."""
    number, _, count = part.partition("/")
    every = [fault for fault in FAULTS if all(word in fault.name for word in words)]
    return every[int(number) :: int(count)]


def main() -> None:
    """Try the faults; print the table, a line as each ends; fail if one was not caught."""
    parser = argparse.ArgumentParser(description="See that tests catch deliberate faults.")
    parser.add_argument("words", nargs="*", help="of the names of faults")
    parser.add_argument("--part", default="0/1", help="which part of so many, as 3/10")
    given = parser.parse_args()
    missed = []
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch) / "penstock"
        shutil.copytree(ROOT, repository, ignore=shutil.ignore_patterns(".git", ".venv", "runs"))
        for fault in chosen(given.words, given.part):
            began = time.perf_counter()
            found = outcome(fault, repository)
            seconds = time.perf_counter() - began
            test = fault.test + (f" ({fault.only})" if fault.only else "")
            line = f"| {fault.name} | `{fault.file}` | `{test}` | {seconds:.0f} s | {found} |"
            print(line, flush=True)
            if found != CAUGHT:
                missed.append(f"{fault.name}: {found}")
    if missed:
        sys.exit("not caught:\n" + "\n".join(missed))


if __name__ == "__main__":
    main()
