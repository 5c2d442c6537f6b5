"""Prove a lowered schedule before anything runs."""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import ScheduleError

from .ir import Schedule
from .laws import SYNCHRONOUS, Lanes, Law
from .laws.memory import peak_live
from .transfers import Transfers


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a verified schedule.

    `peak_live[stage]` is the most micro-batches whose forward `stage` has run and whose backward
    it has not: the bound on what it keeps, in micro-batches.
    """

    num_stages: int
    num_microbatches: int
    peak_live: tuple[int, ...]


def verify(schedule: Schedule, transfers: Transfers, laws: Iterable[Law] = SYNCHRONOUS) -> Proof:
    """Prove that `laws` hold for a schedule in which `transfers` cross between the stages.

    Raises:
        ScheduleError: one of them does not hold; shows the schedule with the spot marked.
    """
    lanes = Lanes(schedule, transfers)
    if not lanes.num_stages or not lanes.num_microbatches:
        raise ScheduleError(f"the schedule runs nothing: {schedule.num_ranks} empty programs")
    for law in laws:
        law(lanes)
    peaks = tuple(peak_live(lanes, stage) for stage in range(lanes.num_stages))
    return Proof(lanes.num_stages, lanes.num_microbatches, peaks)
