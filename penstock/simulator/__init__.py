"""FORESEE: a schedule and what its instructions cost -> the Timeline that will be."""

from penstock.schedules.costs import UNIT_COSTS, Costs

from .simulate import simulate

__all__ = ["UNIT_COSTS", "Costs", "simulate"]
