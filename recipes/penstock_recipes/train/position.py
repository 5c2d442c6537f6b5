"""The position of a run: what is trained so far, its scores, and the best of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from penstock_recipes.recipe.recipe import TrainSection

from .tasks.task import Measure


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The epoch after which the main score was best so far."""

    epoch: int
    step: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The next batch to train on, the steps done, and the sums of the epoch under way.

    Saved in every checkpoint.  The order of the samples follows from the epoch alone.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    """Sum of loss x samples (or words) over the batches of this epoch."""
    num_samples: int = 0
    """Samples (or words) of this epoch so far."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Scores after the last full epoch, by the names of the task's measures."""
    best: Best | None = None
    """None before the first evaluation."""

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """Read the position that a checkpoint holds, as `dataclasses.asdict` wrote it."""
        best = saved.get("best")
        return cls(**{**saved, "best": None if best is None else Best(**best)})

    @property
    def mean_loss(self) -> float:
        """Mean loss over the samples of this epoch so far."""
        return self.loss_sum / self.num_samples if self.num_samples else 0.0

    @property
    def num_begun(self) -> int:
        """Epochs that are trained, the one under way included."""
        return self.epoch + (self.batch > 0)

    @property
    def num_worse(self) -> int:
        """Evaluations since the best one."""
        return self.epoch - (0 if self.best is None else self.best.epoch)

    @property
    def is_best(self) -> bool:
        """Whether the epoch that has just ended is the best one."""
        return self.best is not None and self.best.step == self.step

    def after_batch(self, loss: float, num_samples: int) -> "Position":
        """Return the position one step later."""
        return replace(
            self,
            batch=self.batch + 1,
            step=self.step + 1,
            loss_sum=self.loss_sum + loss * num_samples,
            num_samples=self.num_samples + num_samples,
        )

    def after_epoch(self, scores: Mapping[str, float], main: Measure) -> "Position":
        """Return the start of the next epoch; `main` is the measure that decides the best."""
        epoch, score, best = self.epoch + 1, scores[main.name], self.best
        if main.is_better(score, None if best is None else best.score):
            best = Best(epoch=epoch, step=self.step, score=score)
        return Position(epoch=epoch, step=self.step, scores=scores, best=best)


def why_ended(position: Position, section: TrainSection, main: Measure) -> str:
    """Return why a run has ended, as a clause, and what lets it go on; empty while it has not."""
    epochs, worse = section.epochs, position.num_worse
    if position.num_begun > epochs:
        return (
            f"has begun {position.num_begun} epochs already, so train.epochs cannot become "
            f"{epochs} on resume; give more, or start a new run"
        )
    if position.epoch == epochs:
        return (
            f"has trained all its {epochs} epochs; there is nothing to resume. For more of them: "
            f"--set train.epochs={2 * epochs}"
        )
    if section.patience is not None and worse >= section.patience:
        return (
            f"has ended early, after epoch {position.epoch}: the {main.title} was not better in "
            f"{worse} evaluations; there is nothing to resume. For more of them: --set "
            f"train.patience={2 * worse}"
        )
    return ""
