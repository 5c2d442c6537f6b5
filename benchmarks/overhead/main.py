"""What the executor adds to each instruction, beyond the tensors' own work."""

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.overhead.small_layer import verdict
from benchmarks.report import (
    Column,
    Load,
    Report,
    counts,
    interleaved,
    parser,
    progress,
    publish,
)
from penstock import Pipeline, Recompute, Transport, schedules
from penstock.schedules import ir

TARGET_US = 30.0
TRACE_TARGET_US = 2.0
WIDTH = 8
LEAST_INSTRUCTIONS = 2_048
"""Small steps run several times a measurement, or one hiccup of the machine is all one sees."""
SMALL_LAYER_ROUNDS = 200
MOST_INSTRUCTIONS = 200_000
"""Large steps are measured in fewer rounds, but never fewer than three."""

COLUMNS = (
    Column("transport", "transport"),
    Column("schedule", "schedule"),
    Column("recompute", "recompute"),
    Column("K", "num_stages"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One pipeline of tiny stages, of one Linear(8) layer each."""

    num_stages: int
    num_microbatches: int
    schedule: schedules.Family
    recompute: Recompute
    transport: Transport

    def layers(self) -> list[nn.Module]:
        """Build one layer a stage."""
        return [nn.Linear(WIDTH, WIDTH) for _ in range(self.num_stages)]

    def pipeline(self, *, trace: bool) -> Pipeline:
        """Build the pipeline, on fresh layers."""
        return Pipeline(
            self.layers(),
            partition=[1] * self.num_stages,
            num_microbatches=self.num_microbatches,
            loss=mse_loss,
            schedule=self.schedule,
            recompute=self.recompute,
            transport=self.transport,
            threads_per_stage=1,
            devices="cpu",
            trace=trace,
        )


def own_work(layers: list[nn.Module], data: Tensor, recomputed: dict[int, frozenset[int]]) -> None:
    """Do what the tensors ask for in a plain loop: per micro-batch forward, loss, backward.

    `recomputed[i]` are the stages whose forward the schedule runs twice for micro-batch i.
    """
    num_microbatches = len(data)
    for i, x in enumerate(data.tensor_split(num_microbatches)):
        y = x
        for stage, layer in enumerate(layers):
            if stage in recomputed[i]:
                layer(y.detach())
            y = layer(y)
        (mse_loss(y, x) * (1 / num_microbatches)).backward()


def recomputed_stages(schedule: ir.Schedule) -> dict[int, frozenset[int]]:
    """Give the stages that a schedule recomputes, by micro-batch."""
    pairs = {(x.stage, x.microbatch) for _, x in schedule if isinstance(x, ir.Recompute)}
    return {
        i: frozenset(stage for stage, microbatch in pairs if microbatch == i)
        for i in range(schedule.num_microbatches)
    }


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call took: by the clock, and of all threads' time on a core."""

    wall_s: float
    cpu_s: float


def timed(function: Callable[[], Any], repeats: int) -> Cost:
    """Give the cost of one call, as the mean of `repeats`."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        function()
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return Cost(wall_s / repeats, cpu_s / repeats)


def measure(case: Case, rounds: int, least_instructions: int) -> dict[str, Any]:
    """Time step, traced step and the plain loop in turn; share the differences out."""
    data = torch.randn(case.num_microbatches, WIDTH)
    layers = case.layers()
    with case.pipeline(trace=False) as pipe, case.pipeline(trace=True) as traced:
        schedule = pipe.schedule_for()
        instructions = sum(map(len, schedule.programs))
        repeats = max(1, least_instructions // instructions)
        rounds = min(rounds, max(3, MOST_INSTRUCTIONS // instructions))
        twice = recomputed_stages(schedule)
        step, with_trace, own = interleaved(
            [
                partial(timed, partial(pipe.train_step, data, data), repeats),
                partial(timed, partial(traced.train_step, data, data), repeats),
                partial(timed, partial(own_work, layers, data, twice), repeats),
            ],
            rounds,
        )
    per_instruction = 1e6 / instructions
    extra_s = median(s.wall_s - o.wall_s for s, o in zip(step, own, strict=True))
    extra_cpu_s = median(s.cpu_s - o.cpu_s for s, o in zip(step, own, strict=True))
    trace_s = median(t.cpu_s - s.cpu_s for t, s in zip(with_trace, step, strict=True))
    return {
        "num_microbatches": case.num_microbatches,
        "instructions": instructions,
        "step_s": median(s.wall_s for s in step),
        "own_s": median(o.wall_s for o in own),
        "overhead_us": extra_s * per_instruction,
        "cpu_us": extra_cpu_s * per_instruction,
        "trace_us": trace_s * per_instruction,
    }


def measure_row(cases: list[Case], rounds: int, least_instructions: int) -> dict[str, Any]:
    """Measure cases that differ in M only, in ascending order: a line of the table."""
    measured = [measure(case, rounds, least_instructions) for case in cases]
    first, last = cases[0], measured[-1]
    row = {
        "transport": first.transport.name,
        "schedule": str(first.schedule),
        "recompute": first.recompute.name,
        "num_stages": first.num_stages,
        "cpu_us": last["cpu_us"],
        "trace_us": last["trace_us"],
        "by_num_microbatches": measured,
    }
    return row | {f"us_{m['num_microbatches']}": m["overhead_us"] for m in measured}


def run(options: argparse.Namespace) -> Report:
    """Measure every combination."""
    load = Load.now()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gc.freeze()  # or a full collection walks through all that torch's import made
    rounds = 1 if options.smallest else options.rounds
    all_stages = (1, 2) if options.smallest else options.num_stages
    all_counts = (1, 2) if options.smallest else sorted(options.num_microbatches)
    rows = []
    for to, schedule, recompute, k in product(
        Transport, [schedules.gpipe, schedules.one_f_one_b], [*Recompute][::-1], all_stages
    ):
        progress(f"{to.name}, {schedule.name}, {recompute.name}, K = {k}")
        cases = [Case(k, m, schedule, recompute, to) for m in all_counts]
        rows.append(measure_row(cases, rounds, 1 if options.smallest else LEAST_INSTRUCTIONS))
    most = all_counts[-1]
    per_count = [Column(f"M = {m}: µs", f"us_{m}", ".1f") for m in all_counts]
    per_count += [
        Column(f"M = {most}: CPU µs", "cpu_us", ".1f"),
        Column("trace adds: CPU µs", "trace_us", ".2f"),
    ]
    settings = {"rounds": rounds, "load before": f"{load.before:.2f}"}
    small = verdict(rounds if options.smallest else SMALL_LAYER_ROUNDS)
    said = (*verdicts(rows, most), small, *load.notes)
    return Report((*COLUMNS, *per_count), tuple(rows), settings, said)


def verdicts(rows: list[dict[str, Any]], most: int) -> Iterator[str]:
    """Compare the median and the largest figure at the largest M with the target."""
    for key, what, target_us in [
        (f"us_{most}", "an instruction costs", TARGET_US),
        ("trace_us", "tracing adds", TRACE_TARGET_US),
    ]:
        figures = [float(row[key]) for row in rows]
        within = sum(figure < target_us for figure in figures)
        yield (
            f"At M = {most} {what} {median(figures):.1f} µs in the median of all rows, at most "
            f"{max(figures):.1f} µs; below the target of {target_us:.0f} µs in {within} of "
            f"{len(rows)} rows."
        )


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=9, help="after one of warm-up")
    options.add_argument("--num-stages", type=counts, default=(1, 2, 4, 16), metavar="K,K,...")
    options.add_argument(
        "--num-microbatches", type=counts, default=(4, 16, 128, 1024), metavar="M,M,..."
    )
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
