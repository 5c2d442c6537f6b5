"""WHEN: schedules as data.  Start at ir.py; passes rewrite schedules.

Families of one kind share a file.
"""

from .controllable_memory import v_half, v_min
from .costs import Costs
from .critical_path import critical_path
from .dualpipe_v import dualpipe_v
from .family import Family
from .interleaved import breadth_first, interleaved_1f1b, wave
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
from .names import (
    ALL_SCHEDULES,
    ASYNCHRONOUS_NAMES,
    SCHEDULE_NAMES,
    least_stages_per_rank,
    named_schedule,
    schedule_name,
    suits,
)
from .one_f_one_b import eager_1f1b, gpipe, one_f_one_b
from .pipedream import pipedream, pipedream_2bw
from .searched import searched
from .segmented import segmented
from .text import parse
from .torch_csv import from_csv, to_csv
from .zero_bubble import zb_h1, zb_h2, zb_v

__all__ = [
    "ALL_SCHEDULES",
    "ASYNCHRONOUS_NAMES",
    "SCHEDULE_NAMES",
    "AtMostBytes",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "CommitStatistics",
    "Costs",
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
    "breadth_first",
    "critical_path",
    "dualpipe_v",
    "eager_1f1b",
    "from_csv",
    "gpipe",
    "interleaved_1f1b",
    "least_stages_per_rank",
    "named_schedule",
    "one_f_one_b",
    "parse",
    "pipedream",
    "pipedream_2bw",
    "schedule_name",
    "searched",
    "segmented",
    "suits",
    "to_csv",
    "v_half",
    "v_min",
    "wave",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
