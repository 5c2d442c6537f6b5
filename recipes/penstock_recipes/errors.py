"""Errors of recipes and runs; all are `penstock.PenstockError`s."""

from penstock import PenstockError
from penstock.errors import ConfigError


class RecipeError(ConfigError):
    """A training recipe has an unknown, mistyped or missing key."""


class RunFolderError(PenstockError):
    """A run folder exists already, or the folder to resume is not a run folder."""


class DivergedError(PenstockError, ArithmeticError):
    """The loss of a training run is not finite: the run has diverged."""
