"""What a run is about: samples in order, a model, a loss, and how the model is judged."""

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
"""Which of so many samples are this replica's."""


@dataclass(frozen=True, slots=True)
class Part:
    """Inputs and targets of one call of `train_step`, of this replica.

    `share` is what the part's loss counts in the mini-batch's; those of all parts sum to 1.
    """

    inputs: Any
    targets: Any
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """A mini-batch, in one part or several whose gradients add up.

    `count` is how many samples, or words, it has on all replicas together.
    """

    parts: Sequence[Part]
    count: int
    is_full: bool = True


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure by which a model is judged: its name in files, its name in tables, and its form."""

    name: str
    title: str
    text: Callable[[float], str] = percent_text

    def shown(self, scores: Mapping[str, float]) -> str:
        """Return its text of these figures."""
        return self.text(scores[self.name]) if self.name in scores else "-"


class Task(ABC):
    """What a run is about.

    All that it gives is a function of the recipe and of (epoch, number of the batch), so that a
    run that is resumed there goes on bit by bit.
    """

    unit = "samples"
    """What `Batch.count` counts."""
    measures: tuple[Measure, ...]
    """What `scores` gives; the first is the one that counts."""
    num_test: int
    """Samples to be judged by."""
    reduction: Reduction | Callable[[Any], Any] = Reduction.MEAN
    """How `loss` reduces: see `Pipeline`."""

    def check(self, num_replicas: int) -> None:  # noqa: B027 - few need it
        """See that so many replicas find samples in every mini-batch.

        Raises:
            RecipeError: they do not.
        """

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Make the model; its weights are drawn from torch's generator."""

    @abstractmethod
    def example(self, num_samples: int) -> Any:
        """Return inputs of so many training samples, or of all if there are fewer."""

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
        """Yield inputs and targets of these of the `num_test` samples, in order, a few at once."""

    @abstractmethod
    def tally(self, outputs: Any, targets: Any) -> Tensor:
        """Return what is to be summed up of each sample: float64, (B, counts)."""

    @abstractmethod
    def scores(self, totals: Sequence[float]) -> Mapping[str, float]:
        """Make the figures of `measures` of the sums over all samples to be judged by."""

    def begin_step(self, model: nn.Module, progress: float) -> None:  # noqa: B027 - few need it
        """Prepare the model for a step; `progress` goes from 0 to 1 over the run."""

    def remarks(self) -> Iterator[str]:
        """Say what is to be known of the data before a run begins."""
        return iter(())

    @property
    def skipped(self) -> Sequence[str]:
        """Name what could not be read of the data so far, and was skipped."""
        return ()

    @property
    @abstractmethod
    def data_digest(self) -> str:
        """Tell data apart, so that a run goes on with those that it began with."""

    def begin(self, folder: Path) -> None:
        """Keep what belongs to a run beside it, whenever it begins or goes on.

        Raises:
            ConfigError: what is kept there is of other data.
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
        """Whether what is made of a finished run is there."""
        return True

    def check_start(self, folder: Path) -> None:  # noqa: B027 - few need it
        """See that weights of the run in `folder` mean the same in this one.

        Raises:
            CheckpointError: they do not.
        """

    def finish(self, weights: Weights, folder: Path) -> str:
        """Make what is made of a finished run of its weights, and write it to its folder.

        The weights are read as they are asked for.

        Returns:
            What is to be shown.
        """
        return ""
