"""Recipes as targets of `penstock plan`, `penstock profile` and `penstock check`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock import Target
from penstock.cli import say
from penstock.schedules import least_stages_per_rank
from penstock_recipes.recipe.cookbook import find_recipe
from penstock_recipes.recipe.data_sections import Text
from penstock_recipes.recipe.read import read_recipe
from penstock_recipes.recipe.recipe import Recipe
from penstock_recipes.train.build import target_of
from penstock_recipes.train.tasks import build_task
from penstock_recipes.train.tasks.task import Task


def load(
    name: str, overrides: Sequence[str], options: Mapping[str, Any], needs_values: bool
) -> Target | None:
    """Read the recipe `name` as a target, for the commands; None if it is not a recipe.

    Raises:
        RecipeError, ConfigError: the recipe is wrong, or its data are not there.
    """
    if not name.endswith(".toml") and Path(name).name != name:  # a name has no folder
        return None
    if "schedule" in options:
        fewest = least_stages_per_rank(options["schedule"])
        options = {"stages_per_rank": fewest, **options}
    changes = [*overrides, *(f"pipeline.{key}={value}" for key, value in options.items())]
    if "num_stages" in options:
        changes.append("pipeline.partition=auto")
    path = find_recipe(name)
    recipe = read_recipe(path, changes)
    task = build_task(recipe) if needs_values else _task_of(recipe)
    return target_of(recipe, task, path.stem)


def _task_of(recipe: Recipe) -> Task:
    """Read the data of a recipe; a missing text is replaced by one of the same shapes."""
    data = recipe.data
    if not isinstance(data, Text) or Path(data.path).exists():
        return build_task(recipe)
    from penstock_recipes.train.tasks.language import LanguageTask

    task = LanguageTask(recipe, data, shapes_only=True)
    say(f"{data.path} does not exist: another text of its shape, with the recipe's vocabulary")
    return task
