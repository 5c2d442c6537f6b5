"""Where a run is, and what it has summed up so far: all that a resumed run has to know."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The next batch to train on, the steps done, and the sums of the epoch under way.

    Saved in every checkpoint.  The order of the samples follows from the epoch alone.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    loss_sum: float = 0.0
    """Sum over the samples (or words) of this epoch of the loss of their batch."""
    num_samples: int = 0
    """Samples (or words) of this epoch that were trained on."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """After the last full epoch, by the names of the task's measures."""

    @property
    def mean_loss(self) -> float:
        """Mean loss over the samples of this epoch so far."""
        return self.loss_sum / self.num_samples if self.num_samples else 0.0

    def after_batch(self, loss: float, num_samples: int) -> "Position":
        """Count one more step."""
        return replace(
            self,
            batch=self.batch + 1,
            step=self.step + 1,
            loss_sum=self.loss_sum + loss * num_samples,
            num_samples=self.num_samples + num_samples,
        )

    def after_epoch(self, scores: Mapping[str, float]) -> "Position":
        """Stand at the start of the next epoch."""
        return Position(epoch=self.epoch + 1, step=self.step, scores=scores)
