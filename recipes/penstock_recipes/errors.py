"""Errors of recipes and runs; all are `penstock.PenstockError`s."""

from penstock import PenstockError
from penstock.errors import ConfigError


class RecipeError(ConfigError):
    """A training recipe has an unknown, mistyped or missing key."""


class RunFolderError(PenstockError):
    """A run folder exists already, or the folder to resume from is not one."""


class DivergedError(PenstockError, ArithmeticError):
    """The loss of a training run is infinite or no number: it will not come back."""
