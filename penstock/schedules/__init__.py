"""WHEN: schedules as data.  Start at ir.py; a schedule is one file; passes rewrite schedules."""

from .eager_1f1b import eager_1f1b
from .family import Family
from .gpipe import gpipe
from .interleaved_1f1b import interleaved_1f1b
from .ir import (
    Backward,
    BackwardInput,
    BackwardWeight,
    CommitStatistics,
    Fetch,
    Forward,
    Instruction,
    Offload,
    PostReceive,
    ReceiveActivation,
    ReceiveGradient,
    Recompute,
    ReduceGradients,
    Schedule,
    SendActivation,
    SendGradient,
    UpdateWeights,
)
from .laws import AtMostBytes
from .memory import Sizes
from .names import ALL_SCHEDULES
from .one_f_one_b import one_f_one_b
from .pipedream import pipedream
from .pipedream_2bw import pipedream_2bw
from .text import parse

__all__ = [
    "ALL_SCHEDULES",
    "AtMostBytes",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "CommitStatistics",
    "Family",
    "Fetch",
    "Forward",
    "Instruction",
    "Offload",
    "PostReceive",
    "ReceiveActivation",
    "ReceiveGradient",
    "Recompute",
    "ReduceGradients",
    "Schedule",
    "SendActivation",
    "SendGradient",
    "Sizes",
    "UpdateWeights",
    "eager_1f1b",
    "gpipe",
    "interleaved_1f1b",
    "one_f_one_b",
    "parse",
    "pipedream",
    "pipedream_2bw",
]
