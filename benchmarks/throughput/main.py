"""How close a pipeline of two stages comes to the ideal speed-up, beside its peers."""

import argparse
from collections.abc import Callable
from functools import partial
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
from benchmarks.throughput.contestants import NUM_STAGES, Work, in_process
from benchmarks.throughput.torch_peer import SCHEDULES, TorchPeer

COLUMNS = (
    Column("M", "num_microbatches"),
    Column("contestant", "contestant"),
    Column("ms a step", "ms", ".1f"),
    Column("speed-up", "speedup", ".2f"),
    Column("share of ideal", "share", ".3f"),
    Column("speed-up by rounds", "round_speedup", ".2f"),
    Column("share of ideal by rounds", "round_share", ".3f"),
)
SMALLEST = Work(dim=16, num_heads=2, batch=4, tokens=4)


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
    work: Work, num_microbatches: int, rounds: int, peer: TorchPeer | None
) -> list[dict[str, Any]]:
    """Let all contestants run in turn, round after round."""
    progress(f"M = {num_microbatches}")
    here = in_process(work, num_microbatches, with_torchgpipe=missing("torchgpipe") is None)
    steps: dict[str, Callable[[], float]] = {c.name: c.step for c in here}
    if peer is not None:
        for name in SCHEDULES:
            steps[f"torch {name}"] = partial(peer.step, name, num_microbatches)
    try:
        found = interleaved(list(steps.values()), rounds)
    finally:
        for contestant in here:
            contestant.close()
    return rows(num_microbatches, dict(zip(steps, found, strict=True)))


def start_peer(work: Work, all_num_microbatches: tuple[int, ...]) -> tuple[TorchPeer | None, str]:
    """Start torch.distributed.pipelining, or say why that is not possible."""
    why = missing("torch.distributed.pipelining")
    if why is None:
        try:
            return TorchPeer(work, all_num_microbatches), ""
        except (RuntimeError, OSError, EOFError) as error:
            why = f"{type(error).__name__}: {error}"
    return None, f"torch.distributed.pipelining is left out: {why}."


def run(options: argparse.Namespace) -> Report:
    """Measure all contestants for every number of micro-batches."""
    load = Load.now()
    torch.set_num_threads(1)
    work = SMALLEST if options.smallest else Work()
    all_counts: tuple[int, ...] = (2,) if options.smallest else options.num_microbatches
    rounds = 2 if options.smallest else options.rounds
    peer, note = start_peer(work, all_counts)
    notes = [note] if note else []
    why = missing("torchgpipe")
    if why is not None:
        notes.append(f"torchgpipe is left out: {why}.")
    try:
        table = [row for m in all_counts for row in measure(work, m, rounds, peer)]
    finally:
        if peer is not None:
            peer.close()
    settings = {
        "K": NUM_STAGES,
        "rounds": rounds,
        "threads per stage": 1,
        "load before": f"{load.before:.2f}",
    }
    return Report(COLUMNS, tuple(table), settings, (*notes, *load.notes))


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
