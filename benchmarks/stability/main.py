"""Stability: which learning rates a deep model survives, with and without the paper's cures."""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.report import Column, Report, parser, progress
from benchmarks.side_by_side import publish_runs, side_by_side
from benchmarks.translating import HIGH_RESOURCE, Run, Shape, Training, mean_over, read_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS_PER_STEP = 512
WARMUP_STEPS = 10
MOMENTUM = 0.9
LOGIT_CLIP = 20.0
LAST_STEPS = 5
RATES = (0.5, 0.7, 1.0, 1.4, 2.0)
PLAIN = Shape(
    num_layers=16, ff_width=128, num_heads=2, width=32, head_width=16, depth_scaled=False
)
VARIANTS = {
    "neither": PLAIN,
    "depth-scaled": replace(PLAIN, depth_scaled=True),
    "clipped": replace(PLAIN, logit_clip=LOGIT_CLIP),
    "both": replace(PLAIN, depth_scaled=True, logit_clip=LOGIT_CLIP),
}
PAPER = (
    "The paper (section 5): deep models diverged after a few thousand steps; feed-forward layers "
    "that start smaller with depth, and clipped logits, cured it. It gives no figures."
)

COLUMNS = (
    Column("cure", "name"),
    Column("learning rate", "rate", "g"),
    Column("runs", "runs"),
    Column("diverged", "diverged"),
    Column("largest gradient norm", "largest_norm", ".3g"),
    Column("training loss at the end, worst run", "worst_loss", ".3g"),
    Column("validation loss of those that did not", "loss", ".3f"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    name: str
    rate: float
    seed: int
    num_steps: int
    shape: Shape


def measure(case: Case) -> dict[str, Any]:
    """Train until the steps are done, or something is no number."""
    progress(f"{case.name}, learning rate {case.rate:g}, seed {case.seed}")
    training = Training(
        tokens_per_step=TOKENS_PER_STEP,
        tokens_per_part=TOKENS_PER_STEP,
        peak_rate=case.rate,
        warmup_steps=WARMUP_STEPS,
        seed=case.seed,
        momentum=MOMENTUM,
    )
    texts = read_names(HIGH_RESOURCE)
    run = Run(texts, case.shape, training)
    losses: list[float] = []
    norms: list[float] = []
    for taken in run.steps():
        if not (math.isfinite(taken.loss) and math.isfinite(taken.gradient_norm)):
            break
        losses.append(taken.loss)
        norms.append(taken.gradient_norm)
        if taken.step == case.num_steps:
            break
    is_whole = len(norms) == case.num_steps
    loss = mean_over(HIGH_RESOURCE, run.validation_losses()) if is_whole else math.nan
    knows_nothing = math.log(texts.vocabulary.size)
    return {
        "norms": norms,
        "loss": loss,
        "diverged": not loss < knows_nothing,
        "last_loss": fmean(losses[-LAST_STEPS:]),
    }


def run(options: argparse.Namespace) -> Report:
    """Train every variant at every learning rate, from every seed."""
    start_s = time.perf_counter()
    seeds = range(1 if options.smallest else options.seeds)
    rates = RATES[-1:] if options.smallest else RATES
    num_steps = 2 if options.smallest else options.steps
    num_layers = 2 if options.smallest else PLAIN.num_layers
    cases = [
        Case(name, rate, seed, num_steps, replace(shape, num_layers=num_layers))
        for rate, (name, shape), seed in product(rates[::-1], VARIANTS.items(), seeds)
    ]
    found = side_by_side(measure, cases, 1 if options.smallest else options.jobs)
    rows = []
    for name, rate in product(VARIANTS, rates):
        pairs = zip(cases, found, strict=True)
        runs = [run for case, run in pairs if (case.name, case.rate) == (name, rate)]
        rows.append({"name": name, "rate": rate} | summed_up(runs))
    settings = {
        "model": f"{cases[0].shape} of width {PLAIN.width}",
        "steps": num_steps,
        "tokens a step": TOKENS_PER_STEP,
        "momentum": MOMENTUM,
        "logits clipped at": LOGIT_CLIP,
        "minutes": f"{(time.perf_counter() - start_s) / 60:.1f}",
    }
    return Report(COLUMNS, tuple(rows), settings, (PAPER, *verdicts(rows)))


def summed_up(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Count who diverged; the losses of the others are averaged."""
    losses = [run["loss"] for run in runs if not run["diverged"]]
    return {
        "runs": len(runs),
        "diverged": len(runs) - len(losses),
        "largest_norm": max(norm for run in runs for norm in run["norms"]),
        "worst_loss": max(run["last_loss"] for run in runs),
        "loss": fmean(losses) if losses else None,
        "norms": [run["norms"] for run in runs],
    }


def verdicts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Give the share of runs that diverged, over all learning rates."""
    for name in VARIANTS:
        of_name = [row for row in rows if row["name"] == name]
        diverged, runs = (sum(row[key] for row in of_name) for key in ("diverged", "runs"))
        norms = [max(norms, default=math.nan) for row in of_name for norms in row["norms"]]
        yield (
            f"{name.capitalize()}: {diverged} of {runs} runs diverged; largest gradient norm "
            f"{median(norms):.3g} in the median run, {max(norms):.3g} in the worst."
        )


def draw(report: Report, figure: "Figure") -> None:
    """Draw who diverged, and the gradient norms of the first seed at one learning rate."""
    shares, norms = figure.subplots(1, 2)
    rates = sorted({row["rate"] for row in report.rows})
    telling = _telling_rate(report, rates)
    for number, name in enumerate(VARIANTS):
        rows = [row for row in report.rows if row["name"] == name]
        places = [place + 0.2 * (number - 1.5) for place in range(len(rates))]
        heights = [row["diverged"] / row["runs"] for row in rows]
        shares.bar(places, heights, 0.18, label=name, color=f"C{number}")
        (curve,) = (row["norms"][0] for row in rows if row["rate"] == telling)
        look = {"color": f"C{number}", "linestyle": "-" if number < 2 else "--"}
        norms.plot(range(1, len(curve) + 1), curve, **look)
    shares.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    shares.set(xlabel="learning rate", ylabel="share of runs that diverged", ylim=(0, 1.05))
    shares.legend(fontsize=7)
    norms.set(xlabel="steps", ylabel="gradient norm", yscale="log")
    norms.set_title(f"learning rate {telling:g}, first seed", fontsize=9)
    figure.suptitle("The paper: both cures keep deep models from diverging", fontsize=9)


def _telling_rate(report: Report, rates: list[float]) -> float:
    """Give the lowest learning rate at which a run without a cure diverged."""
    diverged = [row["rate"] for row in report.rows if row["name"] == "neither" and row["diverged"]]
    return min(diverged, default=rates[-1])


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--steps", type=int, default=50)
    publish_runs(options, run, draw, Path(__file__).parent, arguments)


if __name__ == "__main__":
    main()
