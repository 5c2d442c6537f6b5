"""Operators divided among the devices of a stage: layouts, rules, and their execution."""

from . import kernels_language, kernels_vision, rules_language, rules_vision  # noqa: F401 - they register what they know
