"""The names of the zoo are found, and stay what they are whatever is imported first."""

from pathlib import Path
from types import ModuleType

import pytest

from penstock import zoo


def test_names_are_sorted_and_found() -> None:
    assert sorted(zoo.__all__) == sorted(zoo._HOME)
    assert not any(isinstance(getattr(zoo, name), ModuleType) for name in zoo.__all__)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"'penstock\.zoo' has no attribute 'resnet7'"):
        _ = zoo.resnet7


def test_no_module_is_named_as_what_it_holds() -> None:
    """Importing such a module would put it in the place of the function of that name."""
    folder = Path(zoo.__file__).parent
    modules = {path.stem for path in folder.iterdir()} - {"__init__", "__pycache__"}
    assert modules.isdisjoint(zoo.__all__)
