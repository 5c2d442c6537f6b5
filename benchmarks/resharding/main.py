"""What bringing a tensor from mesh to mesh takes, each element once: Alpa's cases."""

import argparse
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Column, Load, Report, interleaved, parser, progress, publish
from benchmarks.throughput.processes import Processes
from penstock.sharding.layouts import Layout, S, Shape

from .cases import N_TO_M, ONE_TO_M, Case
from .contestants import CONTESTANTS, Hosts, prepare

COLUMNS = (
    Column("case", "case"),
    Column("held", "held"),
    Column("wanted", "wanted"),
    Column("processes", "processes"),
    Column("MB", "mb", ".1f"),
    Column("across", "across", ".2f"),
    Column("across, send/recv", "across_plain", ".2f"),
    Column("gathered", "gathered", ".2f"),
    Column("ms", "ms", ".1f"),
    Column("ms, send/recv", "plain_ms", ".1f"),
    Column("ms, signal", "signal_ms", ".1f"),
    Column("send/recv / Penstock", "ratio", ".2f"),
)


def scaled(case: Case, by: int) -> Case:
    """Return a case whose tensor has 1/`by`^3 of the elements."""
    shape = (
        tuple(n // by for n in case.shape) if len(case.shape) > 1 else (case.shape[0] // by**3,)
    )
    return case._replace(shape=shape)


def text_of(mesh: Shape, layout: Layout) -> str:
    """Return a layout as a text."""
    states = ", ".join(f"dim {s.dim}" if isinstance(s, S) else "alike" for s in layout)
    return f"{' x '.join(map(str, mesh))}: {states}"


def rows(processes: Processes, cases: Mapping[str, Case], rounds: int) -> Iterator[dict[str, Any]]:
    """Measure each case."""
    for number, (name, case) in enumerate(cases.items()):
        progress(f"case {name}")
        size = processes.results(("begin", number))[0]
        ours, plain = (
            [*map(sum, zip(*processes.results((f"check {who}", number)), strict=True))]
            for who in CONTESTANTS[:2]
        )
        turns = [partial(processes.step, (who, number)) for who in CONTESTANTS]
        ms, plain_ms, signal_ms = (1e3 * median(own) for own in interleaved(turns, rounds))
        yield {
            "case": name,
            "held": text_of(case.mesh, case.before),
            "wanted": text_of(case.next_mesh, case.after),
            "processes": Hosts(case).num_hosts,
            "mb": size / 1e6,
            "across": ours[0] / size,
            "across_plain": plain[0] / size,
            "gathered": ours[1] / size,
            "ms": ms,
            "plain_ms": plain_ms,
            "signal_ms": signal_ms,
            "ratio": plain_ms / ms,
        }


def run(options: argparse.Namespace) -> Report:
    """Measure everything."""
    load = Load.now()
    rounds, by = (1, 32) if options.smallest else (options.rounds, options.divide)
    cases = {name: scaled(case, by) for name, case in {**N_TO_M, **ONE_TO_M}.items()}
    most = max(Hosts(case).num_hosts for case in cases.values())
    processes = Processes(prepare, [*cases.values()], (), most)
    try:
        found = [*rows(processes, cases, rounds)]
    finally:
        processes.close()
    once = sum(row["across"] == 1 for row in found)
    several = [row["ratio"] > 1 for row in found if row["across_plain"] > 1]
    said = (
        f"Each element crosses once in {once} of {len(found)} cases. Where several devices want "
        f"the same, {sum(several)} of {len(several)} are faster than send/recv."
    )
    settings = {"rounds": rounds, "tensors": f"1/{by**3}", "load before": f"{load.before:.2f}"}
    return Report(COLUMNS, tuple(found), settings, (said, *load.notes))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=10, help="after one of warm-up")
    options.add_argument(
        "--divide", type=int, default=4, metavar="N", help="tensors have 1/N^3 of the elements"
    )
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
