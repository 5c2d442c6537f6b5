"""Operators divided among the devices of a stage: layouts, rules, and their execution."""
