"""What the end of a run shows, on consoles of any width."""

import io
from datetime import timedelta
from typing import Any

from rich.console import Console

from penstock_recipes.train.display import Display, show_summary
from penstock_recipes.train.meter import Meter
from penstock_recipes.train.position import Position
from penstock_recipes.train.scalars import StageMemory, Summary

RAN: Any = {"run_folder": "runs/digits-1", "finished": True, "epochs": 2, "steps": 12}
RAN |= {"unit": "samples", "num_skipped": 0, "result": "", "seconds": 1.5, "samples_per_s": 1000}
SUMMARY = Summary(
    **RAN,
    bubble=0.1,
    share_of_ideal=0.9,
    scores={"test_accuracy": 0.5},
    shown={"test accuracy": "50.0%"},
    stages=(
        StageMemory(stage=0, layers=("stem", "block"), peak_bytes=1024),
        StageMemory(stage=1, layers=("head",), peak_bytes=None),
    ),
)


def shown(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    show_summary(console, SUMMARY)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_tables_of_a_run_are_drawn_where_they_fit() -> None:
    assert shown(80) == [
        "runs/digits-1 after 12 steps",
        "test accuracy   time       throughput  share of ideal  bubble",
        "        50.0%  1.5 s  1,000 samples/s           90.0%   10.0%",
        "kept for backward passes, at most",
        "stage  layers         measured",
        "0      stem to block     1 KiB",
        "1      head                  -",
    ]


def test_a_console_that_is_narrower_than_a_table_shows_its_cells_line_by_line() -> None:
    assert shown(25) == [
        "runs/digits-1 after 12 steps",
        "test accuracy: 50.0%",
        "time: 1.5 s",
        "throughput: 1,000 samples/s",
        "share of ideal: 90.0%",
        "bubble: 10.0%",
        "kept for backward passes, at most",
        "stage: 0",
        "layers: stem to block",
        "measured: 1 KiB",
        "stage: 1",
        "layers: head",
        "measured: -",
    ]


def test_a_terminal_shows_when_the_epoch_and_the_run_end() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with Display(console, 2, 100, FakeTask()) as display:  # type: ignore[arg-type]
        progress = display._progress
        seconds = iter(float(n) for n in range(100))
        progress.get_time = lambda: next(seconds)
        for step in range(1, 5):
            display.show_step(Position(batch=step, step=step, num_samples=1), Meter(1))
        (bar,) = progress.tasks
        assert bar.speed
        expected = timedelta(seconds=round(96 / bar.speed))
        assert bar.fields["left"] == f"epoch ends in {expected},"


class FakeTask:
    measures = ()
    unit = "samples"
