"""Plans that tests share."""

from penstock.costs.layer_facts import LayerFacts
from penstock.planner.placement import Placement
from penstock.planner.plan import Plan
from penstock.schedules import one_f_one_b
from penstock.schedules.family import Family
from penstock.types import Recompute


def layers(count: int) -> tuple[LayerFacts, ...]:
    """Describe a chain of linear layers."""
    return tuple(LayerFacts.of(str(n), "Linear", 20, {"weight": (4, 4)}) for n in range(count))


def plan(*partition: int, schedule: Family = one_f_one_b, num_microbatches: int = 6) -> Plan:
    """Return a plan of linear layers with so many on each stage."""
    return Plan(
        layers=layers(sum(partition)),
        partition=partition,
        schedule=schedule,
        num_microbatches=num_microbatches,
        recompute=(Recompute.STAGE,) * len(partition),
        placement=Placement.of(schedule.ranks(len(partition))),
    )
