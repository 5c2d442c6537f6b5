"""Deep or wide: two translation models with as many parameters, on languages rich and poor."""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.report import Column, Report, parser, progress
from benchmarks.side_by_side import publish_runs, side_by_side
from benchmarks.translating import (
    HIGH_RESOURCE,
    LOW_RESOURCE,
    PAIRS_OF_LOW,
    Run,
    Shape,
    Training,
    mean_over,
    read_names,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPES = {
    "deep": Shape(num_layers=6, ff_width=128, num_heads=2),
    "wide": Shape(num_layers=3, ff_width=256, num_heads=4),
}
"""As T(24, 8192, 16) and T(12, 16384, 32) of the paper: half the layers, twice as wide."""
TOKENS_PER_STEP = 1024
TIMES_LOOKED = 8
PAPER = (
    "The paper (section 5), deep and wide of 1.3 billion parameters: about equal on high-resource "
    "languages, deep far better on low-resource ones."
)

COLUMNS = (
    Column("model", "name"),
    Column("seed", "seed"),
    Column("parameters", "parameters", ","),
    Column("high-resource: NLL", "high_loss", ".3f"),
    Column("chrF", "high_chrf", ".1f"),
    Column("BLEU", "high_bleu", ".1f"),
    Column("low-resource: NLL", "low_loss", ".3f"),
    Column("chrF", "low_chrf", ".1f"),
    Column("BLEU", "low_bleu", ".1f"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One model to train."""

    name: str
    seed: int
    num_steps: int
    languages: int
    """How many of each group."""


def measure(case: Case) -> dict[str, Any]:
    """Train a model, look at its validation loss on the way, and score its translations."""
    high, low = HIGH_RESOURCE[: case.languages], LOW_RESOURCE[: case.languages]
    training = Training(
        tokens_per_step=TOKENS_PER_STEP,
        tokens_per_part=TOKENS_PER_STEP,
        peak_rate=4e-3,
        warmup_steps=100,
        seed=case.seed,
        most_norm=1.0,
    )
    shape = SHAPES[case.name]
    run = Run(read_names(high, low), shape, training)
    row: dict[str, Any] = {"name": f"{case.name}, {shape}", "kind": case.name, "seed": case.seed}
    row |= {"parameters": run.num_parameters, "steps": [], "high_losses": [], "low_losses": []}
    every = max(1, case.num_steps // TIMES_LOOKED)
    for taken in run.steps():
        if taken.step % every == 0 or taken.step == case.num_steps:
            losses = run.validation_losses()
            row["steps"].append(taken.step)
            row["high_losses"].append(mean_over(high, losses))
            row["low_losses"].append(mean_over(low, losses))
            progress(f"{case.name}, seed {case.seed}: step {taken.step} of {case.num_steps}")
        if taken.step == case.num_steps:
            break
    scores = run.scores()
    for group, languages in (("high", high), ("low", low)):
        of_group = scores.only(languages)
        row[f"{group}_loss"] = row[f"{group}_losses"][-1]
        row[f"{group}_chrf"], row[f"{group}_bleu"] = of_group.mean_chrf, of_group.mean_bleu
    return row


def run(options: argparse.Namespace) -> Report:
    """Train every model from every seed."""
    start_s = time.perf_counter()
    seeds = range(1 if options.smallest else options.seeds)
    num_steps = 2 if options.smallest else options.steps
    languages = 1 if options.smallest else len(HIGH_RESOURCE)
    cases = [Case(name, seed, num_steps, languages) for name in SHAPES for seed in seeds]
    rows = side_by_side(measure, cases, 1 if options.smallest else options.jobs)
    settings = {
        "steps": num_steps,
        "tokens a step": TOKENS_PER_STEP,
        "high-resource languages": " ".join(HIGH_RESOURCE[:languages]),
        f"low-resource languages ({PAIRS_OF_LOW} pairs each)": " ".join(LOW_RESOURCE[:languages]),
        "minutes": f"{(time.perf_counter() - start_s) / 60:.1f}",
    }
    return Report(COLUMNS, tuple(rows), settings, (PAPER, *verdicts(rows)))


def verdicts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Say by how much deep is beyond wide."""
    for key, what, form in (("loss", "NLL", "+.3f"), ("chrf", "chrF", "+.1f")):
        high, low = (
            [row[f"{group}_{key}"] for row in _of("deep", rows)]
            + [-row[f"{group}_{key}"] for row in _of("wide", rows)]
            for group in ("high", "low")
        )
        per_group = [2 * fmean(of_group) for of_group in (high, low)]
        yield (
            f"Here, deep less wide in the mean over seeds, {what}: {per_group[0]:{form}} on "
            f"high-resource, {per_group[1]:{form}} on low-resource languages."
        )


def _of(kind: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


def draw(report: Report, figure: "Figure") -> None:
    """Draw the validation losses on the way, and the scores at the end."""
    losses, scores = figure.subplots(1, 2)
    styles = {"high": "-", "low": "--"}
    colours = {"deep": "tab:blue", "wide": "tab:orange"}
    for place, kind in enumerate(SHAPES):
        rows = _of(kind, list(report.rows))
        for group, style in styles.items():
            for number, row in enumerate(rows):
                label = f"{row['name']}: {group}-resource" if number == 0 else None
                curve = row["steps"], row[f"{group}_losses"]
                losses.plot(*curve, style, color=colours[kind], label=label)
            at = (0 if group == "high" else 1) + (place - 0.5) * 0.36
            found = [row[f"{group}_chrf"] for row in rows]
            label = rows[0]["name"] if group == "high" else None
            scores.bar(at, fmean(found), 0.34, color=colours[kind], label=label)
            scores.plot([at] * len(found), found, "k_")
    losses.set(xlabel="steps", ylabel="NLL (validation), nats a word")
    losses.legend(fontsize=7)
    scores.set_xticks([0, 1], ["high-resource\n(paper: equal)", "low-resource\n(paper: deep)"])
    scores.set(ylabel="chrF (test); marks: seeds")
    scores.legend(fontsize=7, loc="lower center")


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--steps", type=int, default=700)
    publish_runs(options, run, draw, Path(__file__).parent, arguments)


if __name__ == "__main__":
    main()
