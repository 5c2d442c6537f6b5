"""WHEN: schedules as data.  Start at ir.py; a schedule is one file; passes rewrite schedules."""

from .eager_1f1b import eager_1f1b
from .gpipe import gpipe
from .ir import (
    Backward,
    CommitStatistics,
    Forward,
    Instruction,
    PostReceive,
    ReceiveActivation,
    ReceiveGradient,
    Recompute,
    ReduceGradients,
    Schedule,
    SendActivation,
    SendGradient,
)
from .one_f_one_b import one_f_one_b
from .text import parse

ALL_SCHEDULES = (gpipe, one_f_one_b, eager_1f1b)
"""Every schedule function; a law that holds for schedules is tested on each of them."""

__all__ = [
    "ALL_SCHEDULES",
    "Backward",
    "CommitStatistics",
    "Forward",
    "Instruction",
    "PostReceive",
    "ReceiveActivation",
    "ReceiveGradient",
    "Recompute",
    "ReduceGradients",
    "Schedule",
    "SendActivation",
    "SendGradient",
    "eager_1f1b",
    "gpipe",
    "one_f_one_b",
    "parse",
]
