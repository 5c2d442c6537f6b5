"""Operators divided among the devices of a stage: layouts, rules, and their execution."""

from . import kernels_language, rules_language  # noqa: F401 - they register what they know
