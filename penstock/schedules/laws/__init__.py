"""The laws that are proved of a schedule before anything runs."""

from collections.abc import Callable, Iterable

from penstock.errors import ScheduleError
from penstock.schedules.ir import Schedule
from penstock.schedules.transfers import Transfers

from .common import (
    AtMostBytes,
    commits,
    complete,
    ends,
    in_order,
    messages,
    offloads,
    operands,
    posts,
    recomputes,
    reductions,
)
from .lanes import Lanes
from .updates import commits_by_minibatch, one_version, updates

__all__ = [
    "ASYNCHRONOUS",
    "SYNCHRONOUS",
    "AtMostBytes",
    "Lanes",
    "Law",
    "in_order",
    "verify",
]

Law = Callable[[Lanes], None]
"""Raises ScheduleError, with the spot marked, if it does not hold."""

_COMMON: tuple[Law, ...] = (
    complete,
    messages,
    in_order,
    operands,
    recomputes,
    offloads,
    posts,
    ends,
)
SYNCHRONOUS: tuple[Law, ...] = (*_COMMON, commits, reductions, one_version)
"""The laws of schedules whose step gives the unsplit model's gradients, in the order of checking.

A law may take for granted that `complete` holds.
"""
ASYNCHRONOUS: tuple[Law, ...] = (*_COMMON, commits_by_minibatch, updates)
"""The laws of schedules in which weights change; a family adds `Sees`, the law of versions."""


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
