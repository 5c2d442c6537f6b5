"""Prove a lowered schedule before anything runs."""

from collections.abc import Iterable

from penstock.errors import ScheduleError

from .ir import Schedule
from .laws import SYNCHRONOUS, Lanes, Law
from .transfers import Transfers


def verify(schedule: Schedule, transfers: Transfers, laws: Iterable[Law] = SYNCHRONOUS) -> None:
    """Prove that `laws` hold for a schedule in which `transfers` cross between the stages.

    Raises:
        ScheduleError: one of them does not hold; shows the schedule with the spot marked.
    """
    lanes = Lanes(schedule, transfers)
    if not lanes.num_stages or not lanes.num_microbatches:
        raise ScheduleError(f"the schedule runs nothing: {schedule.num_ranks} empty programs")
    for law in laws:
        law(lanes)
