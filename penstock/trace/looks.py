"""How each kind of instruction is shown: the one table of all renderers."""

from dataclasses import dataclass

from penstock.schedules import ir


@dataclass(frozen=True, slots=True)
class Look:
    """The name of a kind of time, what a breakdown counts it as, and how it is drawn.

    `letter` stands for it in a grid, on a terminal in the colours `style` (ANSI); a picture has
    boxes filled with `fill`, and numbers in `ink`.  Without a letter it is not drawn.
    """

    name: str
    counts_as: str = "bubble_s"
    letter: str = ""
    style: str = ""
    fill: str = ""
    ink: str = ""


# Hues and lightness both differ, so that the kinds stay apart for the colour-blind and in print.
LOOKS: dict[type[ir.Instruction], Look] = {
    ir.Forward: Look("forward", "forward_s", "F", "30;48;5;110", "#3f74a8", "white"),
    ir.Recompute: Look("recompute", "recompute_s", "R", "30;48;5;152", "#b3d0e8", "#1f3550"),
    ir.Backward: Look("backward", "backward_s", "B", "30;48;5;215", "#e89f45", "#3d2400"),
    ir.BackwardInput: Look(
        "input backward", "backward_s", "I", "30;48;5;222", "#f0bd6e", "#3d2400"
    ),
    ir.BackwardWeight: Look(
        "weight backward", "backward_s", "W", "30;48;5;150", "#9cc069", "#1e3000"
    ),
    ir.SendActivation: Look("send"),
    ir.SendGradient: Look("send"),
    ir.ReceiveActivation: Look("receive"),
    ir.ReceiveGradient: Look("receive"),
    ir.PostReceive: Look("receive"),
    ir.CommitStatistics: Look("statistics"),
    ir.ReduceGradients: Look("reduce", "wait_s"),
    ir.Offload: Look("offload", "wait_s"),
    ir.Fetch: Look("fetch", "wait_s"),
    ir.UpdateWeights: Look("update", "update_s"),
}
IDLE = Look("idle", letter=".", style="2", fill="#eeeeeb", ink="#333333")
"""Time in which nothing runs."""
WAIT = Look("message on its way", fill="#bcbcb6", ink="#333333")
KEPT = Look("kept", fill="#9db8ad", ink="#33503f")
DRAWN = {kind: look for kind, look in LOOKS.items() if look.letter}


def look_of(instruction: ir.Instruction) -> Look:
    """Return how an instruction is shown."""
    return LOOKS[type(instruction)]
