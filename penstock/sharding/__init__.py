"""Operators divided among the devices of a stage: layouts, rules, integer program and plan."""

from . import rules_indices, rules_language, rules_vision  # noqa: F401 - they register what they know
