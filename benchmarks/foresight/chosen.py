"""Of all plans of a small space that are run, is the one that was chosen the fastest?

python -m benchmarks.foresight.chosen
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

import torch

from benchmarks.foresight.cases import Case
from benchmarks.foresight.main import answer, calibrated
from benchmarks.foresight.runners import Planned, step_seconds
from benchmarks.foresight.subjects import SMALLEST, SUBJECTS, Subject
from benchmarks.report import Column, Load, Report, progress
from penstock import Cluster, Profile, Recompute
from penstock.planner.candidates import Constraints
from penstock.planner.predict import Prediction
from penstock.planner.rank import find_plans

KINDS = ("transformer", "AmoebaNet")
FAMILIES = (("gpipe", 1), ("one_f_one_b", 1), ("zb_h1", 1), ("interleaved_1f1b", 2))
CHOSEN = "chosen"
COLUMNS = (
    Column("model", "model"),
    Column("plan", "plan"),
    Column("predicted: ms", "predicted_ms", ".1f"),
    Column("measured: ms", "measured_ms", ".1f"),
    Column("beside the fastest", "beside", "+.1%"),
)


def cases(subject: Subject, num_microbatches: Sequence[int], threads: int) -> Iterator[Case]:
    """Yield the plans of the space where each rank has so many threads."""
    in_two = FAMILIES if threads == 1 else ()
    for count, recompute in product(num_microbatches, Recompute):
        yield Case(subject, "gpipe", 1, 1, count, False, recompute)
        for family, per_rank in in_two:
            yield Case(subject, family, per_rank, 2, count, False, recompute)


def predicted(
    subject: Subject,
    profiles: Sequence[Profile],
    cluster: Cluster,
    num_microbatches: tuple[int, ...],
) -> dict[str, Prediction]:
    """Predict every plan of the space, and the one that is chosen for these micro-batches."""
    found = {}
    for profile in profiles:
        for case in cases(subject, num_microbatches, profile.threads):
            plan = replace(case.plan(profile, cluster), threads_per_stage=profile.threads)
            name = f"{case.short}, {profile.threads} threads each"
            found[name] = Prediction(plan, profile, cluster)
    constraints = (
        Constraints(batch_size=subject.batch, num_microbatches=n) for n in num_microbatches
    )
    choices = [find_plans(profiles, cluster, each, num_best=1).best[0] for each in constraints]
    best = min(choices, key=lambda choice: choice.step_s)
    plan = best.plan
    name = f"{CHOSEN}: {plan.schedule.name}, K {plan.placement.num_ranks}, M "
    name += f"{plan.num_microbatches}, {plan.threads_per_stage} threads each"
    return {name: best.predicted, **found}


def measure(subject: Subject, told: dict[str, Prediction], rounds: int) -> list[dict[str, Any]]:
    """Run all plans in turn."""
    found_s = step_seconds({n: Planned(subject, each.plan) for n, each in told.items()}, rounds)
    fastest_s = min(map(median, found_s))
    return [
        {
            "model": subject.kind,
            "plan": name,
            "predicted_ms": each.timeline.step_s * 1e3,
            "measured_ms": median(its_s) * 1e3,
            "beside": median(its_s) / fastest_s - 1,
            "seconds": list(its_s),
        }
        for (name, each), its_s in zip(told.items(), found_s, strict=True)
    ]


def verdicts(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Say of each model how the chosen plan does."""
    for kind in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == kind]
        soonest = min(own, key=lambda row: float(row["predicted_ms"]))
        fastest = min(own, key=lambda row: float(row["measured_ms"]))
        yield (
            f"- {kind}: what was chosen takes {own[0]['beside']:+.1%} of the fastest of "
            f"{len(own)} plans, which is {fastest['plan']}; the one that was predicted to be the "
            f"fastest, {soonest['plan']}, {soonest['beside']:+.1%}"
        )


def run(options: argparse.Namespace) -> Report:
    """Calibrate, profile, choose, and run all."""
    load = Load.now()
    torch.set_num_threads(1)
    smallest = options.smallest
    num_microbatches = (2,) if smallest else (1, 4, 8, 16)
    rounds = 1 if smallest else options.rounds
    cluster = calibrated(smallest=smallest)
    rows: list[dict[str, Any]] = []
    for subject in SMALLEST if smallest else SUBJECTS:
        if subject.kind in (KINDS[:1] if smallest else KINDS):
            progress(f"the layers of the {subject.kind}")
            profiles = [
                subject.profile(num_microbatches, busy=not smallest, threads=threads)
                for threads in range(1, len(cluster.places) + 1)
            ]
            told = predicted(subject, profiles, cluster, num_microbatches)
            rows += measure(subject, told, rounds)
    settings = {"rounds": rounds, "load before": f"{load.before:.2f}"}
    return Report(COLUMNS, tuple(rows), settings, (*verdicts(rows), *load.notes))


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    answer(__doc__ or "", run, arguments, rounds=7)


if __name__ == "__main__":
    main()
