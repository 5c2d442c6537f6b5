"""Add a note to an exception that names its stage, layer and micro-batch."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
from types import FrameType

from torch.autograd.graph import Node

from penstock.model.stage_plan import Step
from penstock.torch_private import node_number


def note_failure(error: BaseException, stage: int, where: str, microbatch: int) -> None:
    """Add one note with the stage, the layer (`where`) and the micro-batch."""
    error.add_note(f"raised on stage {stage}, in {where}, micro-batch {microbatch}")


def backward_of(error: BaseException, marks: Sequence[tuple[int, Step]]) -> str:
    """Return the name of the layer whose backward raised; for torch's own nodes, of all layers.

    `marks` has, for each layer that ran, the number of the next autograd node when it began.  A
    Python function's node is in the traceback; a node of torch's own is not.
    """
    for number in _node_numbers(error):
        if (step := layer_at(number, marks)) is not None:
            return f"the backward of layer {step.label}"
    steps = [step for _, step in marks]
    if not steps:
        return "the backward of no layer"
    if len(steps) == 1:
        return f"the backward of layer {steps[0].label}"
    return f"the backward of one of the layers {steps[0].label} to {steps[-1].label}"


def layer_at(number: int, marks: Sequence[tuple[int, Step]]) -> Step | None:
    """Return the layer that made a node of the autograd graph, by the node's number."""
    position = bisect_right(marks, number, key=itemgetter(0)) - 1
    return marks[position][1] if position >= 0 else None


def _node_numbers(error: BaseException) -> Iterator[int]:
    traceback = error.__traceback__
    frames: list[FrameType] = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            number = node_number(value) if isinstance(value, Node) else None
            if number is not None:
                yield number
