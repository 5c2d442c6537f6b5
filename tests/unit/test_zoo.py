"""The zoo's public names: sorted, found when asked for, and no sooner."""

import subprocess
import sys

import pytest

from penstock import zoo


def test_public_names_are_sorted_and_found() -> None:
    assert zoo.__all__ == sorted(zoo.__all__)
    assert zoo.__all__ == sorted(zoo._HOME)
    assert all(callable(getattr(zoo, name)) for name in zoo.__all__)
    assert set(zoo.__all__) <= set(dir(zoo))


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"'penstock\.zoo' has no attribute 'amoebanet_z'"):
        zoo.amoebanet_z  # noqa: B018 - looking is what is tried


def test_importing_the_zoo_imports_no_model() -> None:
    program = "import sys, penstock.zoo; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
