"""Foresight: what a step takes and keeps, predicted from layers measured alone, and measured."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.foresight.cases import Case, Choice, every_family
from benchmarks.foresight.runners import Peaks, Planned, peaks, step_seconds
from benchmarks.foresight.subjects import SMALLEST, SUBJECTS, Subject
from benchmarks.report import Column, Load, Report, counts, parser, progress, publish
from penstock import Cluster, Profile
from penstock.doctor.calibration import calibrate
from penstock.doctor.calibration.figures import TINY
from penstock.planner.predict import Prediction

COLUMNS = (
    Column("model", "model"),
    Column("schedule", "schedule"),
    Column("K", "num_ranks"),
    Column("M", "num_microbatches"),
    Column("ranks are", "where"),
    Column("recompute", "recompute"),
    Column("predicted: ms", "predicted_ms", ".1f"),
    Column("measured: ms", "measured_ms", ".1f"),
    Column("off by", "off_by", "+.1%"),
    Column("predicted: KiB", "predicted_kib", ",.0f"),
    Column("measured: KiB", "measured_kib", ",.0f"),
    Column("all stages as predicted", "exact"),
)
GROUPS = ("model", "schedule", "num_ranks", "num_microbatches", "where", "recompute")
KIB = 1024


def calibrated(*, smallest: bool) -> Cluster:
    """Measure this machine, without a pipeline."""
    progress("this machine")
    found = calibrate(2.0, TINY) if smallest else calibrate()
    if found.warning:
        progress(found.warning)
    return found.cluster


def profiles_of(
    subjects: Sequence[Subject], num_microbatches: tuple[int, ...], *, busy: bool
) -> dict[Subject, Profile]:
    """Measure the layers of each model, without a pipeline."""
    found = {}
    for subject in subjects:
        progress(f"the layers of the {subject.kind}")
        found[subject] = subject.profile(num_microbatches, busy=busy)
    return found


def measure(
    cases: Sequence[Case], profiles: dict[Subject, Profile], cluster: Cluster, rounds: int
) -> list[dict[str, Any]]:
    """Predict every case, run all of them in turn, and put both side by side."""
    told: dict[str, Prediction] = {}
    for case in cases:
        profile = profiles[case.subject]
        told[case.name] = Prediction(case.plan(profile, cluster), profile, cluster)
    planned = {case.name: Planned(case.subject, told[case.name].plan) for case in cases}
    found_s = step_seconds(planned, rounds)
    return [
        _row(case, told[case.name], its_s, peaks(planned[case.name]))
        for case, its_s in zip(cases, found_s, strict=True)
    ]


def _row(case: Case, told: Prediction, found_s: Sequence[float], kept: Peaks) -> dict[str, Any]:
    predicted_s, measured_s = told.timeline.step_s, median(found_s)
    predicted_bytes = told.timeline.peak_bytes()
    return {
        "model": case.subject.kind,
        "schedule": case.family,
        "num_ranks": case.num_ranks,
        "num_microbatches": case.num_microbatches,
        "where": "processes" if case.processes else "threads",
        "recompute": case.recompute.name,
        "predicted_ms": predicted_s * 1e3,
        "measured_ms": measured_s * 1e3,
        "off_by": predicted_s / measured_s - 1,
        "predicted_kib": max(predicted_bytes.values()) / KIB,
        "measured_kib": max(kept.values()) / KIB,
        "exact": "yes" if predicted_bytes == kept else "no",
        "predicted_bytes": predicted_bytes,
        "measured_bytes": kept,
        "seconds": list(found_s),
        "plan": told.plan.to_json(),
    }


def verdicts(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield lines that sum up: over all, and over the cases with each value of a factor."""
    yield f"- all {len(rows)} cases: {_errors(rows)}"
    for group in GROUPS:
        values = dict.fromkeys(row[group] for row in rows)
        found = (
            f"{value} {_errors([row for row in rows if row[group] == value])}" for value in values
        )
        yield f"- by {group}: {'; '.join(found)}"
    exact = sum(row["exact"] == "yes" for row in rows)
    yield f"- peaks of activations to the byte on every stage: {exact} of {len(rows)} cases"


def _errors(rows: Sequence[dict[str, Any]]) -> str:
    off = [abs(row["off_by"]) for row in rows]
    return f"{median(off):.1%} (worst {max(off):.1%})"


def run(options: argparse.Namespace) -> Report:
    """Calibrate, profile, predict and measure."""
    load = Load.now()
    torch.set_num_threads(1)
    smallest = options.smallest
    subjects = [s for s in (SMALLEST if smallest else SUBJECTS) if s.kind in options.models]
    families = [f for f in every_family() if not options.families or f[0] in options.families]
    choice = Choice(
        subjects=subjects,
        families=families[::6] if smallest else families,
        num_ranks=(1, 2) if smallest else options.num_ranks,
        num_microbatches=(2,) if smallest else options.num_microbatches,
        processes=[where == "processes" for where in options.where],
    )
    cluster = calibrated(smallest=smallest)
    profiles = profiles_of(subjects, tuple(choice.num_microbatches), busy=not smallest)
    cases = choice.cases(everything=options.all)
    rounds = 1 if smallest else options.rounds
    rows = measure(cases, profiles, cluster, rounds)
    settings = {
        "smallest setting": smallest,
        "rounds": rounds,
        "load before": f"{load.before:.2f}",
    }
    return Report(COLUMNS, tuple(rows), settings, (*verdicts(rows), *load.notes))


def of_one_model(
    columns: tuple[Column, ...],
    measure_rows: Callable[[Subject, Cluster, int], Iterable[dict[str, Any]]],
    options: argparse.Namespace,
) -> Report:
    """Calibrate, and measure the first model in so many rounds."""
    load = Load.now()
    torch.set_num_threads(1)
    rounds = 2 if options.smallest else options.rounds
    subject = (SMALLEST if options.smallest else SUBJECTS)[0]
    rows = tuple(measure_rows(subject, calibrated(smallest=options.smallest), rounds))
    described = {"rounds": rounds, "load before": f"{load.before:.2f}"}
    return Report(columns, rows, described, load.notes)


def answer(
    about: str,
    measure_all: Callable[[argparse.Namespace], Report],
    arguments: list[str] | None,
    rounds: int | None = None,
) -> None:
    """Measure and print what another question asks, whose table is in no README."""
    options = parser(about)
    if rounds is not None:
        options.add_argument("--rounds", type=int, default=rounds, help="of all pipelines")
    chosen = options.parse_args(arguments)
    if chosen.update_readme:
        options.error("the README holds the table of benchmarks.foresight.main")
    publish(measure_all(chosen), chosen, Path(__file__).parent)


def words(text: str) -> list[str]:
    """Read "a,b", for argparse."""
    return text.split(",")


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--models", type=words, default=[s.kind for s in SUBJECTS], metavar="...")
    options.add_argument("--families", type=words, default=[], metavar="NAME,NAME,...")
    options.add_argument("--num-ranks", type=counts, default=(1, 2), metavar="K,K,...")
    options.add_argument("--num-microbatches", type=counts, default=(4, 8, 32), metavar="M,M,...")
    options.add_argument("--where", type=words, default=["threads", "processes"], metavar="...")
    options.add_argument("--rounds", type=int, default=3, help="of all pipelines")
    options.add_argument("--all", action="store_true", help="every combination: hours")
    chosen = options.parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
