"""Two checkouts of Penstock in turn: is the later one as fast as the earlier one?"""

import argparse
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Column, Load, Report, counts, interleaved, parser, progress, publish

NUM_STAGES = 2
TINY_COUNT = 128
WORKER = Path(__file__).with_name("worker.py")
KINDS = ("threads", "processes")
COLUMNS = (
    Column("stages are", "kind"),
    Column("step", "what"),
    Column("M", "num_microbatches"),
    Column("before: ms", "before_ms", ".2f"),
    Column("after: ms", "after_ms", ".2f"),
    Column("before / after", "ratio", ".3f"),
    Column("by rounds", "by_rounds", ".3f"),
    Column("of CPU time", "of_cpu", ".3f"),
)


@dataclass(frozen=True, slots=True)
class Taken:
    """What one step took, in seconds: of the slower process, and of all processes' cores."""

    wall_s: float
    cpu_s: float


class Commit:
    """The processes that run the code of one checkout, with the stages in threads or processes."""

    def __init__(self, checkout: Path, kind: str) -> None:
        port = _free_port()
        ranks = range(NUM_STAGES) if kind == "processes" else [None]
        self._processes = [self._start(checkout.resolve(), rank, port) for rank in ranks]

    def _start(self, checkout: Path, rank: int | None, port: int) -> "subprocess.Popen[str]":
        environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        if rank is not None:
            environment |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(NUM_STAGES),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        return subprocess.Popen(
            [sys.executable, str(WORKER)],
            env=environment,
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self, what: str, num_microbatches: int) -> Taken:
        """Let all processes run a step.

        Raises:
            RuntimeError: one of them ended instead.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{what} {num_microbatches}\n")
            process.stdin.flush()
        answers = [self._answer(process) for process in self._processes]
        return Taken(max(wall_s for wall_s, _ in answers), sum(cpu_s for _, cpu_s in answers))

    def _answer(self, process: "subprocess.Popen[str]") -> tuple[float, float]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of {process.args!r} ended; its message is above")
        wall_s, cpu_s = map(float, line.split())
        return wall_s, cpu_s

    def close(self) -> None:
        """Let the processes end: they read until there is nothing more."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            assert process.stdout is not None
            process.wait(60)
            process.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def measure(
    commits: Sequence[Commit], kind: str, what: str, num_microbatches: int, rounds: int
) -> dict[str, Any]:
    """Let both commits step in turn, each first in every other round: a line of the table."""
    progress(f"{kind}, {what}, M = {num_microbatches}")
    before, after = commits
    order = [before, after, after, before]
    found = interleaved([partial(c.step, what, num_microbatches) for c in order], rounds)
    old, new = [*found[0], *found[3]], [*found[1], *found[2]]
    pairs = list(zip(old, new, strict=True))
    before_s, after_s = (median(t.wall_s for t in side) for side in (old, new))
    return {
        "kind": kind,
        "what": what,
        "num_microbatches": num_microbatches,
        "before_ms": before_s * 1e3,
        "after_ms": after_s * 1e3,
        "ratio": before_s / after_s,
        "by_rounds": median(o.wall_s / n.wall_s for o, n in pairs),
        "of_cpu": median(o.cpu_s / n.cpu_s for o, n in pairs),
    }


def run(options: argparse.Namespace) -> Report:
    """Measure every kind of step."""
    load = Load.now()
    rounds = 1 if options.smallest else options.rounds
    rows = []
    for kind in KINDS:
        commits = [Commit(checkout, kind) for checkout in (options.before, options.after)]
        cases = [*product(("blocks",), options.num_microbatches), ("tiny", TINY_COUNT)]
        if options.smallest:
            cases = [("blocks", 2), ("tiny", 2)]
        rows += [measure(commits, kind, what, count, rounds) for what, count in cases]
        for commit in commits:
            commit.close()
    settings = {"rounds of two steps each": rounds, "load before": f"{load.before:.2f}"}
    return Report(COLUMNS, tuple(rows), settings, load.notes)


def main() -> None:
    """Read the options, measure, print."""
    options = parser(__doc__ or "")
    for name, which in (("before", "earlier"), ("after", "later")):
        text = f"a checkout of the {which} commit; without, the current folder"
        options.add_argument(name, type=Path, nargs="?", default=Path(), help=text)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--num-microbatches", type=counts, default=(4, 8, 32))
    chosen = options.parse_args()
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
