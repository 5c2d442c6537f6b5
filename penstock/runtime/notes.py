"""Say where in the pipeline an exception came from, without changing what it is."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from types import FrameType

import torch
from torch.autograd.graph import Node

from penstock.model.layers import Step


def note_failure(error: BaseException, stage: int, where: str, microbatch: int) -> None:
    """Add one note that names the stage, the layer (`where`) and the micro-batch."""
    error.add_note(f"raised on stage {stage}, in {where}, micro-batch {microbatch}")


def next_node_number() -> int:
    """Give the number that autograd will give the next node that this thread makes."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def backward_of(error: BaseException, marks: Sequence[tuple[int, Step]]) -> str:
    """Name the layer whose backward raised, as nearly as it can be known.

    `marks` holds, for each layer that ran, the number that autograd would have given the next node
    when it began.  A Python function's node stands in the traceback; for a node of torch's own
    only the stage is known.
    """
    numbers, steps = [number for number, _ in marks], [step for _, step in marks]
    for node in _nodes(error):
        position = bisect_right(numbers, node._sequence_nr()) - 1
        if position >= 0:
            return f"the backward of layer {steps[position].label}"
    if not steps:
        return "the backward of no layer"
    if len(steps) == 1:
        return f"the backward of layer {steps[0].label}"
    return f"the backward of one of the layers {steps[0].label} to {steps[-1].label}"


def _nodes(error: BaseException) -> Iterator[Node]:
    traceback = error.__traceback__
    frames: list[FrameType] = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, Node) and hasattr(value, "_sequence_nr"):
                yield value
