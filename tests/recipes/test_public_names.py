"""Recipes use the library as anyone does: by its public names."""

import ast
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "recipes" / "penstock_recipes").rglob("*.py"))
PUBLIC = (
    *("penstock", "penstock.checkpoint", "penstock.cli", "penstock.doctor"),
    *("penstock.errors", "penstock.mesh", "penstock.schedules", "penstock.trace"),
    *("penstock.trace.page", "penstock.trace.units"),
)
"""The modules whose names are kept for users: those in `__all__`, or all where there is none."""
ROOMS = ({"errors"}, {"zoo", "data"}, {"optim", "recipe"}, {"train"}, {"commands"})
"""Who may import whom in penstock_recipes: a module takes from its own folder, and from above."""
SELF_CONTAINED = {"zoo"}
"""Plain modules, which take nothing of penstock but its errors."""


def imports(source: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the modules of penstock that `source` imports from, each with the names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((each.name, ()) for each in node.names if is_ours(each.name))
        elif isinstance(node, ast.ImportFrom) and not node.level and is_ours(node.module or ""):
            yield node.module or "", tuple(each.name for each in node.names)


def is_ours(module: str) -> bool:
    """Tell whether a module is the library's, not that of recipes."""
    return module.split(".")[0] == "penstock"


def private(module: str, names: tuple[str, ...]) -> list[str]:
    """Return what of an import is not public."""
    if module not in PUBLIC:
        return [module]
    found = import_module(module)
    known = getattr(found, "__all__", [name for name in vars(found) if not name.startswith("_")])
    return [f"{module}.{name}" for name in names if name not in known]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recipes_import_public_names_only(path: Path) -> None:
    found = [name for each in imports(path.read_text()) for name in private(*each)]
    assert found == []


def test_a_private_name_is_found() -> None:
    source = "from penstock.runtime.run import Run\nfrom penstock import Plan, _secret\n"
    found = [name for each in imports(source) for name in private(*each)]
    assert found == ["penstock.runtime.run", "penstock._secret"]


def test_imports_of_recipes_point_one_way() -> None:
    height = {room: number for number, rooms in enumerate(ROOMS) for room in rooms}
    for path in MODULES:
        own = path.relative_to(ROOT / "recipes" / "penstock_recipes").parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock_"):
                other = f"{node.module}.".split(".")[1]
                assert other == own or height[other] < height[own], f"{path}: {node.module}"


@pytest.mark.parametrize("path", [path for path in MODULES if SELF_CONTAINED & {*path.parts}])
def test_models_know_nothing_of_pipelines(path: Path) -> None:
    assert {module for module, _ in imports(path.read_text())} <= {"penstock.errors"}


def test_the_library_knows_nothing_of_recipes() -> None:
    for path in (ROOT / "penstock").rglob("*.py"):
        assert "penstock_recipes" not in path.read_text(), path


def test_both_packages_have_one_version() -> None:
    project = tomllib.loads((ROOT / "recipes" / "pyproject.toml").read_text())["project"]
    (library,) = (each for each in project["dependencies"] if each.startswith("penstock"))
    assert project["version"] == penstock.__version__
    assert library == f"penstock[report]=={penstock.__version__}"
    assert f"## [{penstock.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
