"""Write the metrics of a run for TensorBoard, too."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import RecipeError
from penstock.recipe.recipe import Recipe

from .run_files import TENSORBOARD


def check_scalars(recipe: Recipe) -> None:
    """See that what the recipe wants can be written.

    Raises:
        RecipeError: it wants TensorBoard's files, and the package is not installed.
    """
    if recipe.train.tensorboard and find_spec("tensorboard") is None:
        raise RecipeError(
            "train.tensorboard = true needs the package tensorboard, which is not installed: "
            "pip install 'penstock[tensorboard]', or leave the key out; metrics.jsonl has the "
            "same numbers"
        )


class Scalars:
    """Writes scalars into the folder tensorboard/ of a run folder.

    A run that goes on after `step` steps hides what was written of later ones.
    """

    def __init__(self, run_folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_folder / TENSORBOARD), purge_step=step + 1)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the numbers among `values` under their names."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left, and end the writer's thread."""
        self._writer.close()
