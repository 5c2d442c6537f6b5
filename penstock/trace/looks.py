"""Names, letters and colours of instructions and kinds of time: the table of all renderers."""

from dataclasses import dataclass

from penstock.schedules import ir

from .timeline import MemoryKind


@dataclass(frozen=True, slots=True)
class Look:
    """The look of a kind of time, in texts, grids and pages."""

    name: str
    counts_as: str = "bubble_s"
    """The field of `StageTimes` that counts it."""
    letter: str = ""
    """Its letter in a grid; empty: it stands in no grid."""
    fill: str = ""
    """The colour of its boxes on a page; empty: it has none."""
    ink: str = ""
    """The colour of the numbers in its boxes."""


# Hues and lightness both differ, so that the kinds stay apart for the colour-blind and in print.
LOOKS: dict[type[ir.Instruction], Look] = {
    ir.Forward: Look("forward", "forward_s", "F", "#3f74a8", "white"),
    ir.Recompute: Look("recompute", "recompute_s", "R", "#b3d0e8", "#1f3550"),
    ir.Backward: Look("backward", "backward_s", "B", "#e89f45", "#3d2400"),
    ir.BackwardInput: Look("input backward", "backward_s", "I", "#f0bd6e", "#3d2400"),
    ir.BackwardWeight: Look("weight backward", "backward_s", "W", "#9cc069", "#1e3000"),
    ir.SendActivation: Look("send"),
    ir.SendGradient: Look("send"),
    ir.ReceiveActivation: Look("receive"),
    ir.ReceiveGradient: Look("receive"),
    ir.PostReceive: Look("receive"),
    ir.CommitStatistics: Look("statistics", "forward_s", fill="#6f9cc4", ink="white"),
    ir.ReduceGradients: Look("reduce", "wait_s", fill="#8673b0", ink="white"),
    ir.Offload: Look("offload", "wait_s", fill="#4f9d9a", ink="white"),
    ir.Fetch: Look("fetch", "wait_s", fill="#86c2bf", ink="#123735"),
    ir.UpdateWeights: Look("update", "update_s", fill="#b0594f", ink="white"),
}
IDLE = Look("idle", letter=".", fill="#eeeeeb", ink="#333333")
"""Time in which nothing runs."""
WAIT = Look("message on its way", fill="#bcbcb6", ink="#333333")
"""Time of a send or receive in which its message moves."""
KEPT = Look("kept", fill="#9db8ad", ink="#33503f")
"""Activation memory."""
PARTS = {
    "forward_s": LOOKS[ir.Forward],
    "recompute_s": LOOKS[ir.Recompute],
    "backward_s": LOOKS[ir.Backward],
    "weight_s": LOOKS[ir.BackwardWeight],
    "communication_s": Look("communication", fill="#8f8f88", ink="white"),
    "bubble_s": Look("bubble", fill="#d4d4cd", ink="#333333"),
    "imbalance_s": Look("load imbalance", fill="#d98c9f", ink="#3a0d18"),
    "reduction_s": Look("reduction", fill="#8673b0", ink="white"),
    "optimizer_s": Look("optimizer", fill="#b0594f", ink="white"),
    "set_up_s": Look("set-up", fill="#6b6258", ink="white"),
}
"""The kinds of a rank's time, the fields of `RankTimes`."""
MEMORY = {
    MemoryKind.WEIGHTS: Look("weights", fill="#3f74a8"),
    MemoryKind.GRADIENTS: Look("gradients", fill="#e89f45"),
    MemoryKind.OPTIMIZER: Look("optimizer", fill="#b0594f"),
    MemoryKind.VERSIONS: Look("older versions of weights", fill="#8673b0"),
    MemoryKind.BOUNDARIES: Look("boundaries in flight", fill="#8f8f88"),
    MemoryKind.ACTIVATIONS: Look("kept for backward passes", fill="#9db8ad"),
}
"""The kinds of memory, from the bottom of a stack to its top."""
DRAWN = {kind: look for kind, look in LOOKS.items() if look.letter}
"""The looks that have a letter."""


def look_of(instruction: ir.Instruction) -> Look:
    return LOOKS[type(instruction)]
