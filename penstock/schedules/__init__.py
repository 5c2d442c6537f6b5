"""WHEN: schedules as data.  Start at ir.py; a schedule is one file; passes rewrite schedules."""

from .gpipe import gpipe
from .interleaved_1f1b import interleaved_1f1b
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

ALL_SCHEDULES = (gpipe, one_f_one_b)
"""Every schedule function that takes any number of stages, one to a rank.

A law that holds for schedules is tested on each of them, and on `interleaved_1f1b`.
"""

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
    "gpipe",
    "interleaved_1f1b",
    "one_f_one_b",
    "parse",
]
