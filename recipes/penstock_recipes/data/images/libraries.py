"""The libraries that images need, which come with `penstock-recipes[images]`."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from penstock.errors import ConfigError


def require_extra(*modules: str) -> None:
    """Refuse to go on without the libraries for images.

    Raises:
        ConfigError: says which is missing, and how to install it.
    """
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(
                f"images need {module}, which is not installed; "
                "install it with: pip install 'penstock-recipes[images]'"
            )


def pillow() -> Any:
    """Return Pillow's Image module.

    Raises:
        ConfigError: it is not installed.
    """
    require_extra("PIL")
    return import_module("PIL.Image")
