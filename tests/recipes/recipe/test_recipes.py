"""Every recipe that ships can be read, and says how it is started."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch

from penstock_recipes.recipe.cookbook import find_recipe, recipe_names
from penstock_recipes.recipe.data_sections import ImageFolder
from penstock_recipes.recipe.model_sections import AmoebaNet, TranslationTransformer
from penstock_recipes.recipe.read import read_recipe
from penstock_recipes.train.build import build_model
from penstock_recipes.train.tasks import build_task
from penstock_recipes.zoo import amoebanet_b, translation_transformer

RECIPES = [find_recipe(name) for name in recipe_names()]
TASKS = ("cifar10", "cifar100", "cars", "pets", "food101", "aircraft", "birdsnap")
AT_HOME = ("digits", "digits_amoebanet", "digits_parity", "names")


def test_the_papers_recipes_are_there() -> None:
    names = {path.stem for path in RECIPES}
    assert {f"finetune_{task}" for task in TASKS} | {"imagenet_amoebanet_b", "gpt_small"} <= names
    assert sum(name.startswith("translation_T") for name in names) == 5


@cache
def size_of_amoebanet_b(num_layers: int, num_filters: int) -> int:
    """Count the parameters, once for all the recipes that fine-tune one model."""
    with torch.device("meta"):
        made = amoebanet_b(num_layers, num_filters, auxiliary=False)
    return sum(p.numel() for p in made.parameters())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_read_and_says_how_it_is_started(path: Path) -> None:
    recipe = read_recipe(path)
    assert f"penstock train {path.stem}" in path.read_text()
    model = recipe.model
    if isinstance(model, TranslationTransformer):
        with torch.device("meta"):
            made = translation_transformer(
                model.num_layers, model.ff_width, model.num_heads, width=model.width
            )
        assert sum(p.numel() for p in made.parameters()) > 0
    if isinstance(model, AmoebaNet) and model.genotype == "b":
        assert size_of_amoebanet_b(model.num_layers, model.num_filters) == 557_277_864


@pytest.mark.parametrize("task", TASKS)
def test_a_fine_tuning_recipe_says_how_many_steps_it_takes(task: str) -> None:
    path = next(path for path in RECIPES if path.stem == f"finetune_{task}")
    recipe, text = read_recipe(path), path.read_text()
    images, steps, size = (
        int(re.findall(rf"([\d,]+) {what}", text)[0].replace(",", ""))
        for what in ("images in", "steps of", "images\\.")
    )
    assert size == recipe.train.batch_size
    assert steps == images // size * recipe.train.epochs


@pytest.mark.parametrize("task", TASKS)
def test_images_of_any_shape_are_judged_as_they_are_learnt(task: str) -> None:
    data = read_recipe(next(path for path in RECIPES if path.stem == f"finetune_{task}")).data
    assert isinstance(data, ImageFolder)
    assert data.least_area == data.test_share == 1.0 and data.test_squeezed


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "names" else []) for name in AT_HOME],
)
def test_what_a_recipe_at_home_needs_is_here(name: str) -> None:
    recipe = read_recipe(next(path for path in RECIPES if path.stem == name))
    task = build_task(recipe)
    model = build_model(recipe, task)
    assert task.num_steps(0) > 0 and sum(1 for _ in model.parameters()) > 0
