"""What a person sees while training: a progress bar, a line an epoch, and a table at the end."""

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock.trace.units import bytes_text, percent_text

from .meter import Meter
from .position import Position
from .summary import Summary

_FIELDS = ("loss", "accuracy", "speed", "bubble")


class Display:
    """Shows the progress of a run of `num_epochs` of `steps_per_epoch` on `console`."""

    def __init__(self, console: Console, num_epochs: int, steps_per_epoch: int) -> None:
        self._console = console
        self._num_epochs = num_epochs
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            *(TextColumn("{task.fields[" + name + "]}") for name in _FIELDS),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        empty: dict[str, Any] = dict.fromkeys(_FIELDS, "")
        total = num_epochs * steps_per_epoch
        self._task: TaskID = self._progress.add_task("starting", total=total, **empty)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show_step(self, position: Position, meter: Meter) -> None:
        """Move the bar."""
        self._progress.update(
            self._task,
            completed=position.step,
            description=f"epoch {min(position.epoch + 1, self._num_epochs)}/{self._num_epochs}",
            loss=f"loss {position.mean_loss:.4f}",
            accuracy=f"accuracy {_percent(position.test_accuracy)}",
            speed=_speed(meter.samples_per_s),
            bubble=f"bubble {_percent(meter.bubble)}",
        )

    def show_epoch(self, position: Position, meter: Meter, train_loss: float) -> None:
        """Write a line about the epoch that ended."""
        self._console.print(
            f"epoch {position.epoch:>3}/{self._num_epochs}   loss {train_loss:.4f}   "
            f"test accuracy {_percent(position.test_accuracy)}   "
            f"{_speed(meter.samples_per_s)}   bubble {_percent(meter.bubble)}",
            highlight=False,
            soft_wrap=True,
        )


def show_summary(console: Console, summary: Summary) -> None:
    """Write the tables at the end of a run."""
    table = Table(title=f"{summary.run_folder} after {summary.steps} steps", title_justify="left")
    for name in ("test accuracy", "time", "throughput", "share of ideal", "bubble"):
        table.add_column(name, justify="right")
    table.add_row(
        _percent(summary.test_accuracy),
        f"{summary.seconds:.1f} s",
        _speed(summary.samples_per_s),
        _percent(summary.share_of_ideal),
        _percent(summary.bubble),
    )
    console.print(table)
    memory = Table(title="kept for backward passes, at most", title_justify="left")
    memory.add_column("stage", justify="right")
    memory.add_column("layers")
    for name in ("measured", "paper's formula", "ratio"):
        memory.add_column(name, justify="right")
    for stage in summary.stages:
        span = (
            stage.layers[0]
            if len(stage.layers) == 1
            else f"{stage.layers[0]} to {stage.layers[-1]}"
        )
        known = stage.peak_bytes is not None and stage.formula_bytes
        memory.add_row(
            str(stage.stage),
            span,
            bytes_text(stage.peak_bytes) if stage.peak_bytes is not None else "-",
            bytes_text(stage.formula_bytes),
            f"{(stage.peak_bytes or 0) / stage.formula_bytes:.3f}" if known else "-",
        )
    console.print(memory)


def _percent(share: float | None) -> str:
    return "-" if share is None else percent_text(share)


def _speed(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s else "- samples/s"
