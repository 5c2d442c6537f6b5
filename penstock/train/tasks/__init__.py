"""One task for each kind of data."""

from penstock.train.recipe import Recipe

from .pictures import PictureTask
from .task import Task


def build_task(recipe: Recipe) -> Task:
    """Read the data that a recipe names.

    Raises:
        ConfigError: they are not there, or the model is not made for them.
    """
    return PictureTask.of(recipe)
