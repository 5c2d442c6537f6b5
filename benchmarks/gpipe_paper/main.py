"""The tables of GPipe's paper, predicted from descriptions of its models and machines."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.report import Column, Report, parser, progress, publish
from penstock import Cluster

from . import largest, throughput
from .breakdown import breakdown
from .cells import Cell, targets_line
from .cuts import by_time
from .orders import crossover_line, order_line
from .planned import planned
from .throughput import TABLE_2, TABLE_3

COLUMNS = (
    Column("table", "table"),
    Column("model", "model"),
    Column("cell", "what"),
    Column("published", "published_text"),
    Column("predicted", "predicted_text"),
    Column("other settings", "range"),
    Column("ratio", "ratio", ".2f"),
    Column("target", "target_text"),
    Column("verdict", "verdict"),
)


def order_lines(cells: Sequence[Cell]) -> list[str]:
    """Say what of the orders in tables 2 and 3 was predicted."""
    lines: list[str] = []
    for table in (TABLE_2, TABLE_3):
        by_model: dict[str, list[Cell]] = {}
        for cell in cells:
            if cell.table == table:
                by_model.setdefault(cell.model, []).append(cell)
        lines += map(order_line, by_model.values())
        if len(by_model) == 2:
            lines.append(crossover_line(*by_model.values()))
    return lines


def cut_line() -> str:
    """Say what cutting AmoebaNet-D by time, and not by FLOPs, would have brought in table 2."""
    tpu = Cluster.load("tpu-v2-8")
    guess = throughput.amoebanet_guesses_2(tpu, tpu)[0]
    key = 8, 32
    step, other = guess.step(key), replace(guess, cut=by_time).step(key)
    gain = other.samples_per_s / step.samples_per_s - 1
    return (
        f"{guess.subject.name} at K = 8, M = 32, cut by time {list(other.setting.partition)} in "
        f"place of FLOPs {list(step.setting.partition)}: {gain:+.0%} as predicted."
    )


def run(options: argparse.Namespace) -> Report:
    """Predict every table; with `smallest` only the Transformers."""
    progress("Transformers: tables 1 to 3")
    cells = [*throughput.transformers(), *largest.transformers()]
    progress("the largest Transformer")
    big = planned(8 if options.smallest else 128)
    cells += big.cells
    has_amoebanet = not options.smallest
    notes = ["", big.note]
    if has_amoebanet:
        progress("AmoebaNets: tables 1 to 3")
        cells += [*throughput.amoebanets(), *largest.amoebanets()]
        notes.append(cut_line())
    progress("the breakdown")
    cells += breakdown(has_amoebanet=has_amoebanet)
    notes = ["", targets_line(cells), *order_lines(cells), *notes[1:]]
    settings = {"fitted constants": "none"}
    return Report(COLUMNS, tuple(cell.row() for cell in cells), settings, _as_list(notes))


def _as_list(notes: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"- {note}" if note else note for note in notes)


def main(arguments: list[str] | None = None) -> None:
    """Predict and print."""
    chosen = parser(__doc__ or "").parse_args(arguments)
    publish(run(chosen), chosen, Path(__file__).parent)


if __name__ == "__main__":
    main()
