"""FORESEE: a schedule and what its instructions cost -> the Timeline that will be."""

from .costs import UNIT_COSTS, Costs
from .simulate import simulate

__all__ = ["UNIT_COSTS", "Costs", "simulate"]
