"""One model for all languages against one for each, where a language has few pairs."""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.report import Column, Load, Report, parser, progress, publish
from penstock_recipes.recipe.cookbook import find_recipe
from penstock_recipes.recipe.data_sections import Names
from penstock_recipes.recipe.read import read_recipe
from penstock_recipes.train.command import Request, start_run
from penstock_recipes.train.interrupt import Interrupt

RECIPE = find_recipe("names")
SYSTEMS = ("copy", "bilingual", "multilingual")
COLUMNS = (
    Column("language", "language"),
    Column("pairs", "pairs"),
    Column("test names", "num_texts"),
    *(Column(f"{name}: {m}", f"{name}_{m}", ".1f") for name in SYSTEMS for m in ("chrF", "BLEU")),
)
SMALLEST = (
    *("model.width=16", "model.head_width=8", "model.num_heads=2", "model.ff_width=16"),
    *("model.num_layers=1", 'data.kinds=["territories"]', "data.vocabulary_size=300"),
    *("data.beam=1", "train.epochs=1", "data.tokens_per_step=8192", "data.tokens_per_part=8192"),
    *("train.average_checkpoints=1", "train.checkpoint_every=1000"),
)


def train(folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train the recipe; give its scores, by system and language."""
    progress(f"{folder.name}: {' '.join(overrides)}")
    summary = start_run(Request(RECIPE, overrides, folder), Console(stderr=True), Interrupt())
    assert summary.finished
    scores: dict[str, Any] = json.loads((folder / "scores.json").read_text())
    return {"steps": summary.steps, "seconds": summary.seconds, **scores}


def words(languages: Sequence[str]) -> str:
    """Write languages as a recipe has them."""
    return json.dumps(list(languages))


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Train one model of all languages, then one for each language that has few pairs."""
    section = read_recipe(RECIPE).data
    assert isinstance(section, Names)
    few, small = section.low_resource, list(SMALLEST if options.smallest else ())
    languages = ("de", "nl", *few[:1])
    if options.smallest:
        few = few[:1]
        small += [f"data.languages={words(languages)}", f"data.low_resource={words(few)}"]
    shared = train(folder / "multilingual", small)
    rows = []
    for language in few:
        own = [
            f"data.languages={words([language])}",
            f"data.low_resource={words([language])}",
            f"data.vocabulary={folder / 'multilingual' / 'vocabulary.json'}",
            f"train.epochs={1 if options.smallest else options.epochs}",
            "train.checkpoint_every=50",
            "learning_rate.warmup_steps=50",
        ]
        alone = train(folder / f"bilingual-{language}", [*small, *own])
        row = {"language": language, "pairs": section.low_resource_pairs}
        found = {"copy": shared["copy"], "multilingual": shared["model"]}
        for name, scores in {**found, "bilingual": alone["model"]}.items():
            row |= {f"{name}_chrF": scores[language]["chrf"]}
            row |= {f"{name}_BLEU": scores[language]["bleu"]}
        rows.append({**row, "num_texts": shared["model"][language]["num_texts"]})
    everywhere = {
        name: fmean(score["chrf"] for score in shared[name].values()) for name in ("copy", "model")
    }
    notes = [
        f"Mean over the {len(few)} languages: "
        + ", ".join(
            f"{name} {fmean(r[f'{name}_chrF'] for r in rows):.1f} chrF" for name in SYSTEMS
        )
        + ".",
        f"Over all {len(shared['model'])} languages the multilingual model has "
        f"{everywhere['model']:.1f} chrF, copying {everywhere['copy']:.1f}.",
        f"The multilingual model trained {shared['steps']} steps in {shared['seconds']:.0f} s.",
    ]
    return rows, notes


def draw(rows: Sequence[Mapping[str, Any]], figure: Figure) -> None:
    """Draw chrF of the three systems side by side."""
    axes = figure.subplots()
    for number, name in enumerate(SYSTEMS):
        places = [n + 0.27 * (number - 1) for n in range(len(rows))]
        axes.bar(places, [row[f"{name}_chrF"] for row in rows], width=0.25, label=name)
    axes.set_xticks(range(len(rows)), [row["language"] for row in rows])
    axes.set_ylabel("chrF on held-out names")
    axes.set_ylim(0, 100)
    axes.legend()


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and draw."""
    options = parser(__doc__ or "")
    options.add_argument("--epochs", type=int, default=400, help="of each bilingual model")
    options.add_argument("--runs", type=Path, help="where the runs are kept; default: nowhere")
    chosen = options.parse_args(arguments)
    load, here = Load.now(), Path(__file__).parent
    with tempfile.TemporaryDirectory() as scratch:
        rows, notes = measure(chosen, chosen.runs or Path(scratch))
    settings = {"bilingual epochs": chosen.epochs, "recipe": "names"}
    report = Report(COLUMNS, tuple(rows), settings, (*notes, *load.notes))
    publish(report, chosen, here, partial(draw, rows))


if __name__ == "__main__":
    main()
