"""Find, describe and copy the recipes of this package by name."""

from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from penstock_recipes.errors import RecipeError

_FOLDER = Path(str(files("penstock_recipes"))) / "cookbook"
_HEADS = ("task", "model", "data", "time", "measured")
"""The comment lines "# task: ..." at the head of a recipe file."""


@dataclass(frozen=True)
class Description:
    """The description of a recipe, from the head of its file."""

    name: str
    task: str
    model: str
    data: str
    time: str
    measured: str
    """The measured result, or "not run"."""


def recipe_names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe, given as a path or a name.

    Raises:
        RecipeError: there is neither; the message has the nearest names.
    """
    path, text = Path(name), str(name)
    if path.is_file():
        return path
    known = recipe_names()
    if text in known:
        return _FOLDER / f"{text}.toml"
    if ":" in text:
        raise RecipeError(
            f"there is no recipe {text!r}: `train` takes a recipe; `plan`, `profile`, `simulate` "
            "and `check` take package.module:function. To train such a model, call "
            "penstock.Pipeline in a script: README.md and docs/any_model.md have one"
        )
    near = get_close_matches(path.stem, known, n=3, cutoff=0.5)
    if text.endswith(".toml"):
        hint = f"; penstock has one by the name {path.stem}" if path.stem in known else ""
        raise RecipeError(f"there is no recipe {text}{hint}")
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise RecipeError(
        f"there is no recipe {text!r}; {hint}`penstock recipes` lists all; a file ends in .toml"
    )


def describe(name: str) -> Description:
    """Read the head of a recipe file."""
    lines = find_recipe(name).read_text(encoding="utf-8").splitlines()
    facts = dict.fromkeys(_HEADS, "")
    for line in lines:
        head, _, text = line.removeprefix("# ").partition(": ")
        if head in facts:
            facts[head] = text.strip()
    return Description(name, **facts)


def copy_recipe(name: str, folder: Path) -> Path:
    """Copy a recipe into a folder, for the user to change; return the new file.

    Raises:
        RecipeError: there is no such recipe, or the file exists already.
    """
    source, target = find_recipe(name), folder / f"{Path(name).stem}.toml"
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise RecipeError(f"{target} exists already, and is not overwritten") from None
    except OSError as error:
        raise RecipeError(f"cannot write {target}: {error.strerror}") from None
    return target
