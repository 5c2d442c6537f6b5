"""The summary of a run: its final values, also as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from penstock_recipes.errors import RecipeError
from penstock_recipes.recipe.recipe import Recipe


def check_scalars(recipe: Recipe) -> None:
    """Refuse train.tensorboard without the package.

    Raises:
        RecipeError: the recipe needs the package tensorboard, which is not installed.
    """
    if recipe.train.tensorboard and find_spec("tensorboard") is None:
        raise RecipeError(
            "train.tensorboard = true needs the package tensorboard, which is not installed: "
            "pip install 'penstock-recipes[tensorboard]', or leave the key out; metrics.jsonl has "
            "the same numbers"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak activation memory of one stage."""

    stage: int
    layers: tuple[str, ...]
    peak_bytes: int | None
    """Bytes, measured in one step; None if there were too few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Peak memory of an accelerator of this process, from the start of the process on."""

    device: str
    allocated_bytes: int
    """Bytes of tensors."""
    reserved_bytes: int
    """Bytes that PyTorch's allocator took from the device; some were free for new tensors."""
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run, finished or interrupted.  Shares are from 0 to 1; None if they were not measured."""

    run_folder: str
    finished: bool
    epochs: int
    steps: int
    scores: Mapping[str, float]
    """Scores after the last full epoch, by name, such as `test_accuracy`; keys of the JSON."""
    shown: Mapping[str, str]
    """The scores as text, by title."""
    unit: str
    """The unit of `samples_per_s`: samples, or words."""
    num_skipped: int
    """Number of unreadable samples; skipped.txt lists them."""
    result: str
    """The task's report on the finished run."""
    seconds: float
    """Training time of this process, from the first step to the last evaluation."""
    samples_per_s: float
    bubble: float | None
    share_of_ideal: float | None
    stages: tuple[StageMemory, ...]
    devices: tuple[DeviceMemory, ...] = ()
    """Empty on CPUs."""
    flops_per_s: float | None = None
    """FLOPs of forward and backward passes of the whole model, without recomputes, per second."""
    mfu: float | None = None
    """`flops_per_s` as a share of the peak of all devices; None if that is not known."""

    def to_json(self) -> str:
        """Write the summary as one line of JSON."""
        facts = asdict(self)
        del facts["shown"]
        return json.dumps({**facts.pop("scores"), **facts})
