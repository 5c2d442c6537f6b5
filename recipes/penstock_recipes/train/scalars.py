"""What a run came to: the values of its end as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from penstock_recipes.errors import RecipeError
from penstock_recipes.recipe.recipe import Recipe


def check_scalars(recipe: Recipe) -> None:
    """See that what the recipe wants can be written.

    Raises:
        RecipeError: it wants TensorBoard's files, and the package is not installed.
    """
    if recipe.train.tensorboard and find_spec("tensorboard") is None:
        raise RecipeError(
            "train.tensorboard = true needs the package tensorboard, which is not installed: "
            "pip install 'penstock-recipes[tensorboard]', or leave the key out; metrics.jsonl has "
            "the same numbers"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What one stage kept at most for its backward passes."""

    stage: int
    layers: tuple[str, ...]
    peak_bytes: int | None
    """Measured in one step; None if there were too few steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run, finished or interrupted.  Shares are from 0 to 1; None where nothing was measured."""

    run_folder: str
    finished: bool
    epochs: int
    steps: int
    scores: Mapping[str, float]
    """After the last full epoch, by name, such as `test_accuracy`; in the JSON beside the rest."""
    shown: Mapping[str, str]
    """The same as texts, by title."""
    unit: str
    """What `samples_per_s` counts: samples, or words."""
    num_skipped: int
    """What could not be read of the data; skipped.txt names it."""
    result: str
    """What the task makes of a finished run."""
    seconds: float
    """Of this process, from the first step to the last evaluation."""
    samples_per_s: float
    bubble: float | None
    share_of_ideal: float | None
    stages: tuple[StageMemory, ...]

    def to_json(self) -> str:
        """Write the summary as one line of JSON."""
        facts = asdict(self)
        del facts["shown"]
        return json.dumps({**facts.pop("scores"), **facts})
