"""The interface of a task: samples in order, a model, a loss, and scores."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penstock import Reduction
from penstock.errors import ConfigError
from penstock.trace.units import percent_text
from penstock_recipes.train.run_files import replace_text
from penstock_recipes.train.weights import Weights

DIGEST = "data.digest"

Share = Callable[[int], slice]
"""Number of samples -> the slice of them that this replica takes."""


@dataclass(frozen=True, slots=True)
class Part:
    """This replica's inputs and targets of one call of `train_step`.

    `share` is the weight of its loss in the mini-batch; the shares of all parts sum to 1.
    """

    inputs: Any
    targets: Any
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch of one or more parts, whose gradients add up.

    `count` is its number of samples, or words, on all replicas together.
    """

    parts: Sequence[Part]
    count: int
    is_full: bool = True


@dataclass(frozen=True, slots=True)
class Measure:
    """A score of a model: its name in files, its title in tables, and its text form."""

    name: str
    title: str
    text: Callable[[float], str] = percent_text
    higher_is_better: bool = True

    def shown(self, scores: Mapping[str, float]) -> str:
        """Return the score as text; "-" if it is absent."""
        return self.text(scores[self.name]) if self.name in scores else "-"

    def is_better(self, score: float, best: float | None) -> bool:
        """Tell whether a score is better than the best so far; no infinite one is."""
        if best is None or not math.isfinite(score):
            return math.isfinite(score)
        return score > best if self.higher_is_better else score < best


class Task(ABC):
    """Data, model, loss and scores of a run.

    Every result is a function of the recipe and of (epoch, number of the batch), so that a
    resumed run keeps its bits.
    """

    unit = "samples"
    """The unit of `Batch.count`."""
    measures: tuple[Measure, ...]
    """The measures of `scores`; the first is the main one."""
    num_test: int
    """Number of held-out samples."""
    reduction: Reduction | Callable[[Any], Any] = Reduction.MEAN
    """The reduction of `loss`: see `Pipeline`."""

    def check(self, num_replicas: int) -> None:  # noqa: B027 - few need it
        """Check that every mini-batch has a sample for each replica.

        Raises:
            RecipeError: one has too few.
        """

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Build the model; its weights are drawn from torch's default generator."""

    @abstractmethod
    def example(self, num_samples: int) -> Any:
        """Return the inputs of `num_samples` training samples, or of all if there are fewer."""

    @abstractmethod
    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """Compute the mean loss of a micro-batch."""

    @abstractmethod
    def num_steps(self, epoch: int) -> int:
        """Count the mini-batches of an epoch."""

    @abstractmethod
    def batches(self, epoch: int, first: int, share: Share) -> Iterator[Batch]:
        """Return the mini-batches of an epoch from number `first` on."""

    @abstractmethod
    def tests(self, samples: Sequence[int]) -> Iterator[tuple[Any, Any]]:
        """Yield inputs and targets of these held-out samples, in order, a few at a time."""

    @abstractmethod
    def tally(self, outputs: Any, targets: Any) -> Tensor:
        """Return the counts of each sample that `scores` needs: float64, (B, counts)."""

    @abstractmethod
    def scores(self, totals: Sequence[float]) -> Mapping[str, float]:
        """Compute the scores from the sums of `tally` over all held-out samples."""

    def begin_step(self, model: nn.Module, progress: float) -> None:  # noqa: B027 - few need it
        """Prepare the model for a step; `progress` goes from 0 to 1 over the run."""

    def remarks(self) -> Iterator[str]:
        """Yield lines about the data, shown before a run begins."""
        return iter(())

    @property
    def skipped(self) -> Sequence[str]:
        """The names of the unreadable samples so far."""
        return ()

    @property
    @abstractmethod
    def data_digest(self) -> str:
        """A digest of the data, so that a run resumes with the same data."""

    def begin(self, folder: Path) -> None:
        """Write the digest of the data to the run folder, or compare it on resume.

        Raises:
            ConfigError: the run began with other data.
        """
        digest, path = self.data_digest, folder / DIGEST
        if not path.is_file():
            replace_text(path, digest + "\n")
        elif path.read_bytes().strip() != digest.encode():
            raise ConfigError(
                f"the data are not those that {folder} began with, as {path} says, so it cannot "
                "go on with them; put the old ones back, or start a new run"
            )

    def is_made(self, folder: Path) -> bool:
        """Tell whether the results of the finished run are there."""
        return True

    def check_start(self, folder: Path) -> None:  # noqa: B027 - few need it
        """Check that this run can start from weights of the run in `folder`.

        Raises:
            CheckpointError: it cannot.
        """

    @abstractmethod
    def predict(self, model: nn.Module, inputs: Sequence[str]) -> Iterator[str]:
        """Yield a text for each input, by a model in evaluation mode.

        Without inputs, the task has its own.

        Raises:
            PenstockError: an input cannot be read, or there is none and the task has none.
        """

    def finish(self, weights: Weights, folder: Path) -> str:
        """Write the results of a finished run to its folder; the weights are read lazily.

        Returns:
            A text to show.
        """
        return ""
