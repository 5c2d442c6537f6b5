"""Batch size: what 4 and 16 times as many tokens a step do for a translation model."""

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.report import Column, Report, parser, progress
from benchmarks.side_by_side import publish_runs, side_by_side
from benchmarks.translating import HIGH_RESOURCE, Run, Shape, Training, mean_over, read_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = Shape(num_layers=2, ff_width=256, num_heads=2)
TOKENS_PER_PART = 512
PARTS_PER_STEP = (1, 4, 16)
PAPER = {1: ("260K", 2.58, 30.92), 4: ("1M", 2.51, 31.86), 16: ("4M", 2.46, 32.71)}
"""Tokens a step, negative log-likelihood and BLEU, German to English, by parts in a step."""

COLUMNS = (
    Column("tokens a step", "tokens", ","),
    Column("same steps: NLL", "same_steps_loss", ".3f"),
    Column("BLEU", "same_steps_bleu", ".1f"),
    Column("chrF", "same_steps_chrf", ".1f"),
    Column("same epochs: steps", "num_steps", ","),
    Column("NLL", "loss", ".3f"),
    Column("BLEU", "bleu", ".1f"),
    Column("chrF", "chrf", ".1f"),
    Column("paper: tokens a step", "paper_tokens"),
    Column("paper: NLL", "paper_loss", ".2f"),
    Column("paper: BLEU", "paper_bleu", ".2f"),
)
AVERAGED = ("same_steps_loss", "same_steps_bleu", "same_steps_chrf", "loss", "bleu", "chrf")


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    parts_per_step: int
    seed: int
    epochs: int
    languages: int

    def training(self, parts_per_step: int) -> Training:
        """Give how a model learns; steps of all sizes are made of the same parts in one order."""
        return Training(
            tokens_per_step=parts_per_step * TOKENS_PER_PART,
            tokens_per_part=TOKENS_PER_PART,
            peak_rate=4e-3,
            warmup_steps=30,
            seed=self.seed,
            most_norm=1.0,
        )


def measure(case: Case) -> dict[str, Any]:
    """Train a model; judge it when the largest steps would be done, and when it has seen as much
    as they.
    """
    languages = HIGH_RESOURCE[: case.languages]
    texts = read_names(languages)
    same_steps = case.training(PARTS_PER_STEP[-1]).num_steps(texts, case.epochs)
    run = Run(texts, SHAPE, case.training(case.parts_per_step))
    found: dict[str, Any] = {"steps": [], "losses": [], "same_steps": same_steps}
    epochs_done = 0
    for taken in run.steps():
        if taken.step == same_steps:
            found |= {f"same_steps_{key}": value for key, value in judged(run, languages).items()}
        if taken.epochs_done > epochs_done:
            epochs_done = taken.epochs_done
            found["steps"].append(taken.step)
            found["losses"].append(mean_over(languages, run.validation_losses()))
            tokens = case.parts_per_step * TOKENS_PER_PART
            progress(f"{tokens} tokens, seed {case.seed}: epoch {epochs_done} of {case.epochs}")
        if epochs_done == case.epochs:
            break
    return found | judged(run, languages)


def judged(run: Run, languages: tuple[str, ...]) -> dict[str, float]:
    """Give validation loss, BLEU and chrF, as means over languages."""
    scores = run.scores()
    loss = mean_over(languages, run.validation_losses())
    return {"loss": loss, "bleu": scores.mean_bleu, "chrf": scores.mean_chrf}


def run(options: argparse.Namespace) -> Report:
    """Train with steps of every size, from every seed."""
    start_s = time.perf_counter()
    seeds = range(1 if options.smallest else options.seeds)
    epochs = 1 if options.smallest else options.epochs
    languages = 1 if options.smallest else len(HIGH_RESOURCE)
    cases = [Case(parts, seed, epochs, languages) for parts in PARTS_PER_STEP for seed in seeds]
    found = side_by_side(measure, cases, 1 if options.smallest else options.jobs)
    rows = []
    for parts in PARTS_PER_STEP:
        pairs = zip(cases, found, strict=True)
        runs = [run for case, run in pairs if case.parts_per_step == parts]
        rows.append(row_of(parts, runs))
    settings = {
        "model": str(SHAPE),
        "same steps": found[0]["same_steps"],
        "same epochs": epochs,
        "seeds": len(seeds),
        "tokens in memory at once": TOKENS_PER_PART,
        "languages": " ".join(HIGH_RESOURCE[:languages]),
        "minutes": f"{(time.perf_counter() - start_s) / 60:.1f}",
    }
    return Report(COLUMNS, tuple(rows), settings, tuple(verdicts(rows)))


def row_of(parts: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Give the means over seeds."""
    tokens, loss, bleu = PAPER[parts]
    row = {
        "tokens": parts * TOKENS_PER_PART,
        "same_steps": runs[0]["same_steps"],
        "num_steps": runs[0]["steps"][-1],
        "paper_tokens": tokens,
        "paper_loss": loss,
        "paper_bleu": bleu,
        "runs": runs,
    }
    return row | {key: fmean(run[key] for run in runs) for key in AVERAGED}


def verdicts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Compare the largest steps with the smallest."""
    for before, what in (("same_steps_", "after as many steps"), ("", "after as many epochs")):
        loss, bleu = (gain(rows, before + key) for key in ("loss", "bleu"))
        yield (
            f"{what.capitalize()}, {PARTS_PER_STEP[-1]} times as many tokens a step change NLL by "
            f"{loss:+.3f} and BLEU by {bleu:+.1f}."
        )
    loss, bleu = (gain(rows, f"paper_{key}") for key in ("loss", "bleu"))
    yield f"The paper's (which does not say after how much): NLL by {loss:+.2f}, BLEU {bleu:+.2f}."


def gain(rows: list[dict[str, Any]], key: str) -> float:
    """Give what the largest steps add to a figure of the smallest."""
    return float(rows[-1][key] - rows[0][key])


def draw(report: Report, figure: "Figure") -> None:
    """Draw validation losses by epochs and by steps, and the paper's."""
    by_epoch, by_step, paper = figure.subplots(1, 3)
    for number, row in enumerate(report.rows):
        for run in row["runs"]:
            look = curve_look(number, row, run is row["runs"][0])
            by_epoch.plot(range(1, len(run["losses"]) + 1), run["losses"], **look)
            early = {row["same_steps"]: run["same_steps_loss"]}
            points = sorted((early | dict(zip(run["steps"], run["losses"], strict=True))).items())
            by_step.plot(*zip(*points, strict=True), **look)
    by_epoch.set(xlabel="epochs", ylabel="NLL (validation), nats a word")
    by_step.set(xlabel="steps", xscale="log")
    by_epoch.legend(fontsize=7, title="tokens a step", title_fontsize=7)
    names = [row["paper_tokens"] for row in report.rows]
    paper.plot(names, [row["paper_loss"] for row in report.rows], "ks-")
    paper.set(xlabel="tokens a step", title="the paper's")


def curve_look(number: int, row: Mapping[str, Any], labelled: bool) -> dict[str, Any]:
    """Give colour and name of a curve."""
    return {
        "color": f"C{number}",
        "marker": ".",
        "label": f"{row['tokens']:,}" if labelled else None,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--epochs", type=int, default=12)
    publish_runs(options, run, draw, Path(__file__).parent, arguments)


if __name__ == "__main__":
    main()
