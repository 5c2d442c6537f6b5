"""PREDICT: a schedule and the costs of its instructions -> the predicted Timeline."""

from penstock.schedules.costs import UNIT_COSTS, Costs

from .engine import Pool, Way
from .measured import measured_costs
from .simulate import Sharing, simulate

__all__ = ["UNIT_COSTS", "Costs", "Pool", "Sharing", "Way", "measured_costs", "simulate"]
