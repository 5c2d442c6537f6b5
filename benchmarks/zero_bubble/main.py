"""What schedules gain over 1F1B, measured and predicted, on two and four ranks, beside torch's."""

import argparse
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.report import Column, Load, Report, counts, interleaved, parser, progress, publish
from benchmarks.throughput.contestants import check
from benchmarks.throughput.processes import OfProcesses, Processes
from benchmarks.zero_bubble import penstock_processes, torch_peer
from benchmarks.zero_bubble.emulated import Work
from penstock.schedules.costs import Costs

COLUMNS = (
    Column("W", "weights"),
    Column("K", "num_ranks"),
    Column("M", "num_microbatches"),
    Column("contestant", "contestant"),
    Column("ms a step", "ms", ".1f"),
    Column("share of 1F1B's ideal", "share", ".3f"),
    Column("gain over 1F1B", "gain", ".3f"),
    Column("predicted", "predicted", ".3f"),
    Column("off by", "off_by", "+.1%"),
)


def measure(
    work: Work,
    num_microbatches: int,
    rounds: int,
    ours: Processes,
    theirs: Processes,
    costs: Mapping[int, Costs],
) -> list[dict[str, Any]]:
    """Let all contestants run in turn, round after round; the first one is our 1F1B."""
    progress(f"K = {work.num_ranks}, M = {num_microbatches}, W of layers {work.weights}")
    own = tuple(penstock_processes.WAYS)
    of_torch = torch_peer.names(work.num_ranks, num_microbatches)
    everyone = [
        *(OfProcesses(name, num_microbatches, ours) for name in own),
        *(OfProcesses(name, num_microbatches, theirs) for name in of_torch),
    ]
    check(everyone)
    found_s = interleaved([contestant.step for contestant in everyone], rounds)
    predicted_s = {
        name: penstock_processes.predicted_s(name, work, num_microbatches, costs) for name in own
    }
    ideal_s = work.step_s(num_microbatches)
    rows: list[dict[str, Any]] = []
    for contestant, its_s in zip(everyone, found_s, strict=True):
        gain = median(before / after for before, after in zip(found_s[0], its_s, strict=True))
        row: dict[str, Any] = {
            "weights": "even" if len(set(work.weights)) == 1 else "first half",
            "num_ranks": work.num_ranks,
            "num_microbatches": num_microbatches,
            "contestant": contestant.name,
            "ms": median(its_s) * 1e3,
            "share": ideal_s / median(its_s),
            "gain": gain,
            "seconds": its_s,
        }
        if contestant.name in predicted_s:
            predicted = predicted_s[own[0]] / predicted_s[contestant.name]
            row |= {"predicted": predicted, "off_by": gain / predicted - 1}
        rows.append(row)
    return rows


def run(options: argparse.Namespace) -> Report:
    """Measure all contestants for every number of ranks and of micro-batches."""
    load = Load.now()
    torch.set_num_threads(1)
    smallest = options.smallest
    of_microbatches: tuple[int, ...] = (4,) if smallest else options.num_microbatches
    rounds = 2 if smallest else options.rounds
    table = []
    layer_s = 1e-4 if smallest else options.ms / 1e3
    works = [Work(num_ranks=n, layer_s=layer_s) for n in ((2,) if smallest else options.num_ranks)]
    uneven = (5.0,) * 4 + (0.0,) * 4
    works.append(Work(num_ranks=2, layer_s=layer_s / 2, inputs=2.0, weights=uneven))
    for work in works:
        with ExitStack() as stack:
            both = []
            for prepare in (penstock_processes.prepare, torch_peer.prepare):
                both.append(Processes(prepare, work, of_microbatches, work.num_ranks))
                stack.callback(both[-1].close)
            ours, theirs = both
            costs = penstock_processes.costs(ours)
            for num_microbatches in of_microbatches:
                table += measure(work, num_microbatches, rounds, ours, theirs, costs)
    settings = {
        "layers": work.num_layers,
        "ms of a layer's F, I and W": work.layer_s * 1e3,
        "rounds": rounds,
        "load before": f"{load.before:.2f}",
    }
    return Report(COLUMNS, tuple(table), settings, load.notes)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=10, help="after one of warm-up")
    options.add_argument("--ms", type=float, default=4.0, help="of a layer's F, I and W each")
    options.add_argument("--num-ranks", type=counts, default=(2, 4), metavar="K,K,...")
    options.add_argument("--num-microbatches", type=counts, default=(4, 8, 32), metavar="M,M,...")
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
