"""Show training in the terminal: a progress bar, a line per epoch, and a table at the end."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from penstock.trace.units import bytes_text, columns, percent_text

from .meter import Meter
from .position import Position
from .run_files import SKIPPED
from .scalars import Summary
from .tasks.task import Task

_FIELDS = ("left", "loss", "score", "speed", "bubble")


class Display:
    """Shows the progress of a run on `console`."""

    def __init__(
        self, console: Console, num_epochs: int, steps_per_epoch: int, task: Task
    ) -> None:
        self._console, self._task = console, task
        self._num_epochs, self._steps_per_epoch = num_epochs, steps_per_epoch
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            *(TextColumn("{task.fields[" + name + "]}") for name in _FIELDS),
            TextColumn("run ends in"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        empty: dict[str, Any] = dict.fromkeys(_FIELDS, "")
        total = num_epochs * steps_per_epoch
        self._bar: TaskID = self._progress.add_task("starting", total=total, **empty)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _left(self, position: Position) -> str:
        """Say when the epoch under way ends, by the speed of the newest steps."""
        speed = next(task.speed for task in self._progress.tasks if task.id == self._bar)
        if not speed:
            return ""
        seconds = (self._steps_per_epoch - position.batch) / speed
        return f"epoch ends in {timedelta(seconds=max(0, round(seconds)))},"

    def show_step(self, position: Position, meter: Meter) -> None:
        """Update the progress bar."""
        self._progress.update(
            self._bar,
            completed=position.step,
            description=f"epoch {min(position.epoch + 1, self._num_epochs)}/{self._num_epochs}",
            left=self._left(position),
            loss=f"loss {position.mean_loss:.4f}",
            score=self._scores(position, 1),
            speed=_speed(meter.samples_per_s, self._task.unit),
            bubble=f"bubble {_percent(meter.bubble)}",
        )

    def show_epoch(
        self, position: Position, meter: Meter, train_loss: float, num_skipped: int
    ) -> None:
        """Print a line about the epoch that ended."""
        skipped = f"   {num_skipped:,} unreadable" if num_skipped else ""
        say(
            self._console,
            f"epoch {position.epoch:>3}/{self._num_epochs}   loss {train_loss:.4f}   "
            f"{self._scores(position)}   {_speed(meter.samples_per_s, self._task.unit)}   "
            f"bubble {_percent(meter.bubble)}{skipped}",
        )

    def _scores(self, position: Position, most: int | None = None) -> str:
        measures = self._task.measures[:most]
        return "   ".join(f"{m.title} {m.shown(position.scores)}" for m in measures)


def show_summary(console: Console, summary: Summary) -> None:
    """Print the result, the summary and the memory of each stage at the end of a run."""
    if summary.num_skipped:
        say(
            console,
            f"{summary.num_skipped:,} that could not be read are neither learnt from nor judged "
            f"by: {summary.run_folder}/{SKIPPED}",
        )
    if summary.result:
        say(console, summary.result)
    # The results in one row, then the memory of each stage.
    heads = (*summary.shown, "time", "throughput", "share of ideal", "bubble")
    values = (
        *summary.shown.values(),
        f"{summary.seconds:.1f} s",
        _speed(summary.samples_per_s, summary.unit),
        _percent(summary.share_of_ideal),
        _percent(summary.bubble),
    )
    title = f"{summary.run_folder} after {summary.steps} steps"
    _say_table(console, title, [heads, values], num_left=0)
    memory = [("stage", "layers", "measured")]
    for stage in summary.stages:
        span = " to ".join(dict.fromkeys((stage.layers[0], stage.layers[-1])))
        measured = "-" if stage.peak_bytes is None else bytes_text(stage.peak_bytes)
        memory.append((str(stage.stage), span, measured))
    _say_table(console, "kept for backward passes, at most", memory, num_left=2)


def say(console: Console, *lines: str) -> None:
    """Print lines without markup or wrapping."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _say_table(
    console: Console, title: str, rows: Sequence[tuple[str, ...]], num_left: int
) -> None:
    """Print a table, or one line per cell if the console is narrower than the table."""
    lines = list(columns(rows, num_left))
    if max(map(len, lines)) > console.width:
        pairs = (pair for row in rows[1:] for pair in zip(rows[0], row, strict=True))
        lines = [f"{head}: {cell}" for head, cell in pairs]
    say(console, title, *lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else percent_text(share)


def _speed(samples_per_s: float, unit: str) -> str:
    return f"{samples_per_s:,.0f} {unit}/s" if samples_per_s else f"- {unit}/s"
