"""Write docs/recipe_keys.md: every key of a recipe, from the descriptions beside them.

python -m scripts.recipe_keys            print the page
python -m scripts.recipe_keys --write    replace the page
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from pydantic.fields import FieldInfo

from penstock_recipes.recipe.read import FREE_ON_RESUME
from penstock_recipes.recipe.recipe import Recipe
from penstock_recipes.recipe.section import Section, variants

PAGE = Path(__file__).parents[1] / "docs" / "recipe_keys.md"
HEAD = """# Every key of a recipe

A recipe is a TOML file of sections and keys. To change one for a run:

    penstock train RECIPE.toml --set section.key=value

This page is written by `python -m scripts.recipe_keys --write`.
"""


def page() -> str:
    """Give the page."""
    parts = [HEAD]
    for name, field in Recipe.model_fields.items():
        for kind in variants(field):
            parts.append("\n".join(_section(name, kind)))
    return "\n".join(parts)


def _section(name: str, kind: type[Section]) -> Iterator[str]:
    named = kind.model_fields.get("name")
    words = "" if named is None else f' with `name = "{get_args(named.annotation)[0]}"`'
    yield f"## `[{name}]`{words}"
    yield ""
    yield _one_line(kind.__doc__ or "").replace("|", "\\|")
    yield ""
    yield "| key | default | meaning |"
    yield "| --- | --- | --- |"
    for key, field in kind.model_fields.items():
        if key != "name":
            meaning = _one_line(field.description or "").replace("|", "\\|")
            free = " May change on resume." if f"{name}.{key}" in FREE_ON_RESUME else ""
            yield f"| `{key}` | {_default(field)} | {meaning}{free} |"
    yield ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "left out"
    if isinstance(value, tuple):
        return f"`{list(value)}`".replace("'", '"')
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    else:
        sys.stdout.write(page())
