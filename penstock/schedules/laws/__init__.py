"""What must hold for a schedule before anything runs: one small law a file."""

from collections.abc import Callable

from .closing import commits, reductions
from .complete import complete
from .ends import ends
from .in_order import in_order
from .lanes import Lanes
from .memory import AtMostBytes, AtMostLive
from .messages import messages
from .offloads import offloads
from .operands import operands
from .posts import posts
from .recomputes import recomputes
from .updates import commits_by_minibatch, one_version, updates

__all__ = [
    "ASYNCHRONOUS",
    "OF_MEMORY",
    "SYNCHRONOUS",
    "AtMostBytes",
    "AtMostLive",
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
"""The laws of schedules in which weights change; a family adds which version a forward sees."""
OF_MEMORY = (AtMostLive, AtMostBytes)
"""The laws of what is kept; they hold for the order in which a family trains, and for no other."""
