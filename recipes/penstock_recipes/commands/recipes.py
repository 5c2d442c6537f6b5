"""`penstock recipes`: list the recipes that come with the package, or copy one to change it."""

import json
from dataclasses import asdict
from pathlib import Path

import click

from penstock_recipes.recipe.cookbook import copy_recipe, describe, find_recipe, recipe_names


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Write the list as JSON.")
@click.pass_context
def recipes(context: click.Context, as_json: bool) -> None:
    """List the recipes: task, model, data, time on two CPU cores, and what was measured.

    \b
    Examples:
      penstock recipes
      penstock recipes show digits
      penstock recipes copy digits .
    """
    if context.invoked_subcommand is not None:
        return
    descriptions = [describe(name) for name in recipe_names()]
    if as_json:
        click.echo(json.dumps([asdict(description) for description in descriptions]))
        return
    for recipe in descriptions:
        click.echo(f"{recipe.name}\n  {recipe.task}: {recipe.model} on {recipe.data}")
        click.echo(f"  time: {recipe.time}; measured: {recipe.measured}")
    click.echo("\nTrain one with `penstock train NAME`; change one after `penstock recipes copy`.")


@recipes.command()
@click.argument("name")
def show(name: str) -> None:
    """Print the file of the recipe NAME."""
    click.echo(find_recipe(name).read_text(encoding="utf-8"), nl=False)


@recipes.command()
@click.argument("name")
@click.argument("folder", default=".", type=click.Path(file_okay=False, path_type=Path))
def copy(name: str, folder: Path) -> None:
    """Copy the recipe NAME into FOLDER; no file is overwritten."""
    target = copy_recipe(name, folder)
    click.echo(f"{target} is written; train it with: penstock train {target}")
