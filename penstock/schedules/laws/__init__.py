"""The laws that are proved of a schedule before anything runs."""

from collections.abc import Callable

from .common import (
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
from .memory import AtMostBytes
from .updates import commits_by_minibatch, one_version, updates

__all__ = [
    "ASYNCHRONOUS",
    "SYNCHRONOUS",
    "AtMostBytes",
    "Lanes",
    "Law",
    "in_order",
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
