"""Operators divided among the devices of a stage: layouts, rules, integer program and plan."""
