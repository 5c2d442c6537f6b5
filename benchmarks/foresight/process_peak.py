"""Is the most memory that each process of a step needs foretold, before any pipeline ran?

    foretold         `Foretold.process_bytes`, from a calibration and profiles of the layers
    measured         VmHWM of fresh processes after three steps, freed memory given back at once
    as it is         the same with the allocator left alone, which keeps freed memory in pieces

python -m benchmarks.foresight.process_peak
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from benchmarks.foresight.cases import Case
from benchmarks.foresight.main import answer, calibrated
from benchmarks.foresight.runners import Planned
from benchmarks.foresight.subjects import SMALLEST, Subject
from benchmarks.report import Column, Load, Report, progress
from benchmarks.throughput.processes import Key, Part, Processes
from penstock import Profile, Recompute, init_mesh
from penstock.doctor.calibration.process_bytes import resident_bytes
from penstock.planner.predict import Foretold

COLUMNS = (
    Column("model", "model"),
    Column("schedule", "schedule"),
    Column("K", "num_ranks"),
    Column("M", "num_microbatches"),
    Column("recompute", "recompute"),
    Column("process", "process"),
    Column("of its own", "own", ".0%"),
    Column("foretold: MiB", "foretold_mib", ",.0f"),
    Column("measured: MiB", "measured_mib", ",.0f"),
    Column("off by", "off_by", "+.1%"),
    Column("as it is: MiB", "kept_mib", ",.0f"),
)
MIB = 1 << 20
NUM_STEPS = 3
KEY: Key = ("steps", 0)
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""With these glibc maps each large block on its own, and unmaps it when it is freed."""

TRANSFORMER = Subject(kind="transformer", depth=8, width=512, side=128, batch=16)
WIDE = Subject(kind="transformer", depth=8, width=1024, side=32, batch=8)
CONVOLUTION = Subject(kind="convolution", depth=9, width=64, side=48, batch=32)
AMOEBANET = Subject(kind="AmoebaNet", depth=6, width=128, side=64, batch=64)
NEVER, STAGE = Recompute.NEVER, Recompute.STAGE
CASES = (
    Case(TRANSFORMER, "gpipe", 1, 1, 4, False, NEVER),
    Case(TRANSFORMER, "gpipe", 1, 2, 4, True, NEVER),
    Case(TRANSFORMER, "one_f_one_b", 1, 2, 4, False, STAGE),
    Case(WIDE, "one_f_one_b", 1, 2, 4, False, NEVER),
    Case(WIDE, "zb_h1", 1, 2, 4, True, NEVER),
    Case(CONVOLUTION, "gpipe", 1, 1, 4, False, STAGE),
    Case(CONVOLUTION, "one_f_one_b", 1, 4, 4, False, NEVER),
    Case(CONVOLUTION, "one_f_one_b", 1, 2, 4, True, NEVER),
    Case(AMOEBANET, "gpipe", 1, 1, 4, False, NEVER),
    Case(AMOEBANET, "interleaved_1f1b", 2, 2, 4, False, NEVER),
    Case(AMOEBANET, "one_f_one_b", 1, 2, 4, True, STAGE),
)
FEWEST = (
    Case(SMALLEST[0], "gpipe", 1, 1, 2, False, NEVER),
    Case(SMALLEST[0], "one_f_one_b", 1, 2, 2, True, STAGE),
)


@contextmanager
def environment(settings: dict[str, str]) -> Iterator[None]:
    """Let processes that are started meanwhile find these settings."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def prepare(rank: int, planned: Planned, _: tuple[int, ...]) -> dict[Key, Part]:
    """Make, in one of the processes, its part of a pipeline, and what runs its steps."""
    plan, between = planned.plan, planned.plan.transport.is_between_processes
    pipe = planned.pipeline(init_mesh(num_stages=plan.placement.num_ranks) if between else None)
    own = plan.placement.stages_of(rank) if between else range(plan.num_stages)
    readers = {"inputs": 0, "targets": plan.num_stages - 1}
    data = zip(readers.items(), planned.subject.data(), strict=True)
    batch: dict[str, Any] = {
        name: value.clone() if stage in own else None for (name, stage), value in data
    }
    del data

    def run() -> int | None:
        for _ in range(NUM_STEPS):
            pipe.zero_grad()
            pipe.train_step(**batch)
        return resident_bytes("VmHWM")

    return {KEY: Part(run, {})}


def peaks(planned: Planned, settings: dict[str, str]) -> list[int]:
    """Run a plan in fresh processes; return the most that each had in memory."""
    placement = planned.plan.placement
    count = placement.num_ranks if planned.plan.transport.is_between_processes else 1
    with environment(settings):
        processes = Processes(prepare, planned, (), count)
        try:
            return processes.results(KEY)
        finally:
            processes.close()


def rows_of(case: Case, told: Foretold) -> Iterator[dict[str, Any]]:
    """Run a case, and yield a row for each process."""
    found = told.process_bytes(with_optimizer=False)
    assert found is not None, "this machine was calibrated"
    bases = [told.cluster.host_of(place).process_bytes or 0 for place in told.places]
    planned = Planned(case.subject, told.plan)
    measured, kept = peaks(planned, GIVES_BACK), peaks(planned, {})
    for n, (foretold, base) in enumerate(zip(found, bases, strict=False)):
        row = {
            "model": case.subject.kind,
            "schedule": case.family,
            "num_ranks": case.num_ranks,
            "num_microbatches": case.num_microbatches,
            "recompute": case.recompute.name,
            "process": f"of rank {n}" if case.processes else "of all",
            "own": 1 - base / foretold,
            "foretold_mib": foretold / MIB,
            "measured_mib": measured[n] / MIB,
            "off_by": foretold / measured[n] - 1,
            "kept_mib": kept[n] / MIB,
        }
        progress(f"{case.name}: {row}")
        yield row


def verdicts(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Sum up."""
    off = [abs(row["off_by"]) for row in rows]
    more = [row["kept_mib"] / row["measured_mib"] - 1 for row in rows]
    yield f"- off by {median(off):.1%} (worst {max(off):.1%}) in {len(rows)} processes"
    yield f"- as it is, glibc keeps {median(more):.0%} more than is needed (worst {max(more):.0%})"


def run(options: argparse.Namespace) -> Report:
    """Calibrate, profile, foretell and run."""
    load = Load.now()
    torch.set_num_threads(1)
    cases = FEWEST if options.smallest else CASES
    cluster = calibrated(smallest=True)  # of memory; how fast it is changes little
    profiles: dict[Subject, Profile] = {}
    rows: list[dict[str, Any]] = []
    for case in cases:
        if case.subject not in profiles:
            progress(f"the layers of the {case.subject.kind}")
            profiles[case.subject] = case.subject.profile((case.num_microbatches,), busy=False)
        profile = profiles[case.subject]
        rows += rows_of(case, Foretold(case.plan(profile, cluster), profile, cluster))
    settings = {"steps": NUM_STEPS, "load before": f"{load.before:.2f}"}
    return Report(COLUMNS, tuple(rows), settings, tuple(verdicts(rows)))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    answer(__doc__ or "", run, arguments)


if __name__ == "__main__":
    main()
