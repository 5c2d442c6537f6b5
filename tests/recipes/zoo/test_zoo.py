"""The zoo's public names: sorted, found when asked for, and no sooner."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from penstock_recipes import zoo


def test_public_names_are_found_whatever_was_imported() -> None:
    assert sorted(zoo.__all__) == sorted(zoo._HOME)
    for name in zoo.__all__:
        home = importlib.import_module(zoo._HOME[name])
        assert getattr(zoo, name) is getattr(home, name)
    assert set(zoo.__all__) <= set(dir(zoo))


def test_no_module_is_named_as_what_it_holds() -> None:
    """Importing such a module would put it in the place of the function of that name."""
    folder = Path(zoo.__file__).parent
    modules = {path.stem for path in folder.iterdir()} - {"__init__", "__pycache__"}
    assert modules.isdisjoint(zoo.__all__)


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        AttributeError, match=r"'penstock_recipes\.zoo' has no attribute 'amoebanet_z'"
    ):
        zoo.amoebanet_z  # noqa: B018 - looking is what is tried


def test_importing_the_zoo_imports_no_model() -> None:
    program = "import sys, penstock_recipes.zoo; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
