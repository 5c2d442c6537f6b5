"""FORESEE: a schedule and what its instructions cost -> the Timeline that will be."""

from penstock.schedules.costs import UNIT_COSTS, Costs

from .measured import measured_costs
from .simulate import simulate

__all__ = ["UNIT_COSTS", "Costs", "measured_costs", "simulate"]
