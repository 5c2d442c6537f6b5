"""How close a pipeline of two stages comes to the ideal speed-up, beside its peers."""

import argparse
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.report import (
    Column,
    Load,
    Report,
    counts,
    interleaved,
    missing,
    parser,
    progress,
    publish,
)
from benchmarks.throughput import deepspeed_peer, limit, penstock_processes, torch_peer
from benchmarks.throughput.contestants import (
    NUM_STAGES,
    WAYS,
    Contestant,
    Work,
    check,
    in_process,
    measured,
)
from benchmarks.throughput.processes import OfProcesses, Prepare, Processes

COLUMNS = (
    Column("M", "num_microbatches"),
    Column("contestant", "contestant"),
    Column("ms a step", "ms", ".1f"),
    Column("speed-up", "speedup", ".2f"),
    Column("share of ideal", "share", ".3f"),
    Column("speed-up by rounds", "round_speedup", ".2f"),
    Column("share of ideal by rounds", "round_share", ".3f"),
    Column("gain over 1F1B", "gain", ".3f"),
    Column("predicted", "predicted", ".3f"),
)
SMALLEST = Work(dim=16, num_heads=2, batch=4, tokens=4)


@dataclass(frozen=True, slots=True)
class Peer:
    """A package whose stages are processes, and the contestants that it runs."""

    package: str
    prepare: Prepare[Work]
    names: tuple[str, ...]
    lacks_bubble: bool = False


PEERS = (
    Peer("torch", limit.prepare, limit.NAMES, lacks_bubble=True),
    Peer("penstock", penstock_processes.prepare, penstock_processes.NAMES),
    Peer("torch.distributed.pipelining", torch_peer.prepare, torch_peer.NAMES),
    Peer("deepspeed", deepspeed_peer.prepare, deepspeed_peer.NAMES),
)


class Running:
    """The peers whose processes run, and why others do not."""

    def __init__(self, work: Work, counts: tuple[int, ...]) -> None:
        self._running: list[tuple[Peer, Processes]] = []
        self.notes: list[str] = []
        for peer in PEERS:
            try:
                self._running.append((peer, _start(peer, work, counts)))
            except (RuntimeError, ImportError) as error:
                self.notes.append(f"{peer.package} is left out: {error}.")

    def contestants(self, num_microbatches: int) -> list[Contestant]:
        """Give what they can run."""
        return [
            OfProcesses(name, num_microbatches, processes, peer.lacks_bubble)
            for peer, processes in self._running
            for name in peer.names
        ]

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        for _peer, processes in self._running:
            processes.close()


def _start(peer: Peer, work: Work, counts: tuple[int, ...]) -> Processes:
    """Start a peer's processes, and let each of its contestants run a step.

    Raises:
        ImportError: the peer is not installed.
        RuntimeError: it does not run.
    """
    if find_spec(peer.package) is None:  # not imported: that is for its own processes
        raise ImportError("it is not installed")
    processes = Processes(peer.prepare, work, counts)
    try:
        for name in peer.names:
            for count in counts:
                processes.step((name, count))
    except BaseException:
        processes.close()
        raise
    return processes


def ideal(num_microbatches: int) -> float:
    """Give the speed-up that the bubble leaves: K * M / (M + K - 1)."""
    return NUM_STAGES * num_microbatches / (num_microbatches + NUM_STAGES - 1)


def rows(num_microbatches: int, seconds: dict[str, tuple[float, ...]]) -> list[dict[str, Any]]:
    """Compare each contestant with the first one: by medians, and round by round."""
    plain_s = next(iter(seconds.values()))
    best = ideal(num_microbatches)
    table = []
    for name, own_s in seconds.items():
        speedup = median(plain_s) / median(own_s)
        by_rounds = median(p / o for p, o in zip(plain_s, own_s, strict=True))
        table.append(
            {
                "num_microbatches": num_microbatches,
                "contestant": name,
                "ms": median(own_s) * 1e3,
                "speedup": speedup,
                "share": speedup / best,
                "round_speedup": by_rounds,
                "round_share": by_rounds / best,
                "seconds": own_s,
            }
        )
    return table


def measure(
    work: Work, num_microbatches: int, rounds: int, running: Running
) -> list[dict[str, Any]]:
    """Let all contestants run in turn, round after round."""
    progress(f"M = {num_microbatches}")
    here = in_process(work, num_microbatches, with_torchgpipe=missing("torchgpipe") is None)
    everyone: list[Contestant] = [*here, *running.contestants(num_microbatches)]
    try:
        check(everyone)
        found = interleaved([contestant.step for contestant in everyone], rounds)
    finally:
        for contestant in here:
            contestant.close()
    names = [contestant.name for contestant in everyone]
    table = rows(num_microbatches, dict(zip(names, found, strict=True)))
    return [row | gains(row, table, work) for row in table]


def gains(row: dict[str, Any], table: list[dict[str, Any]], work: Work) -> dict[str, float]:
    """Compare a schedule of Penstock's with 1F1B that runs likewise, round by round."""
    name, _, where = str(row["contestant"]).removeprefix("Penstock ").partition(", ")
    if name not in WAYS or not where:
        return {}
    first = "one_f_one_b"
    (first_s,) = (r["seconds"] for r in table if r["contestant"] == f"Penstock {first}, {where}")
    count = row["num_microbatches"]
    predicted = WAYS[first].predicted_s(work, count) / WAYS[name].predicted_s(work, count)
    gain = median(before / after for before, after in zip(first_s, row["seconds"], strict=True))
    return {"gain": gain, "predicted": predicted}


def run(options: argparse.Namespace) -> Report:
    """Measure all contestants for every number of micro-batches."""
    load = Load.now()
    torch.set_num_threads(1)
    work = SMALLEST if options.smallest else Work()
    all_counts: tuple[int, ...] = (4,) if options.smallest else options.num_microbatches
    rounds = 2 if options.smallest else options.rounds
    why = missing("torchgpipe")
    notes = [] if why is None else [f"torchgpipe is left out: {why}."]
    progress("what the stages take")
    costs = [item for m in all_counts for item in measured(work, m).items()]
    work = replace(work, costs=dict(costs))
    with Running(work, all_counts) as running:
        table = [row for m in all_counts for row in measure(work, m, rounds, running)]
    settings = {
        "K": NUM_STAGES,
        "rounds": rounds,
        "threads per stage": 1,
        "load before": f"{load.before:.2f}",
    }
    return Report(COLUMNS, tuple(table), settings, (*notes, *running.notes, *load.notes))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=20, help="after one of warm-up")
    options.add_argument(
        "--num-microbatches", type=counts, default=(4, 8, 32), metavar="M,M,...", help="4,8,32"
    )
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
