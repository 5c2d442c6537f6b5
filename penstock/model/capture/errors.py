"""Errors of code between blocks that no stage could run, with the line of the model's code."""

import sys
from typing import Any

from torch import Tensor

from penstock.errors import CutError

from .events import EventKey, Operation
from .ghost import Ghost


def changes_container(part: Any, key: EventKey) -> CutError:
    return CutError(
        f"{key} changes a {type(part).__name__} that it was given ({calling_line()}), and each "
        "stage has one of its own. Return what it puts in there, or give it a list or a dict, and "
        "only once in a call: what a block changes in these is told to all stages"
    )


def keeps_container(part: Any, key: EventKey) -> CutError:
    return CutError(
        f"{key} changes a {type(part).__name__} that outlives the model's forward, in an "
        "attribute, a global variable or the default value of an argument: all stages would "
        "change it at the same time, for all micro-batches. Make it inside the forward and pass "
        "it along, or give it to the model as an input"
    )


def writes_into(tensor: Tensor, operation: Operation, parameter: str | None) -> CutError:
    """Make the error for a write between blocks; `parameter` is the tensor's name if it is one."""
    if parameter is not None:
        return CutError(
            f"'{operation.name}', {operation.key}, changes the parameter {parameter!r} in place "
            f"between blocks ({calling_line()}): each stage would do so, for each micro-batch, "
            "while others read it. Change it once before the capture, or inside the block that "
            "it belongs to (RWKV of transformers: rescale_every=0)"
        )
    return CutError(
        f"'{operation.name}', {operation.key}, writes a routed value into a tensor of shape "
        f"{tuple(tensor.shape)} that each stage makes for itself ({calling_line()}), so that "
        "later ones would not see it. Make that tensor in the forward (x.new_zeros(...)), or name "
        "in blocks= a module that does all of this"
    )


def replaces_parameter(key: EventKey, name: str) -> CutError:
    return CutError(
        f"{key} is called with another tensor in place of its {name!r} ({calling_line()}), as by "
        "torch.func.functional_call: each stage would do so, while another one runs that block. "
        "Put this call into an nn.Module with parameters and name it in blocks=, or let "
        "torch.nn.utils.parametrize compute the weight"
    )


def written_through_a_view(operation: Operation, ghost: Ghost, writer: EventKey) -> CutError:
    return CutError(
        f"'{operation.name}', {operation.key}, reads the {ghost.info.value} ({calling_line()}), "
        f"into whose memory {writer} has written through another view of it, made before that "
        "block: on another stage the two would be apart. Make the view where it is written into, "
        "or name in blocks= a module that does all of this"
    )


def differentiates(operation: Operation) -> CutError:
    return CutError(
        f"'{operation.name}', {operation.key}, computes gradients in the model's forward "
        f"({calling_line()}), back through blocks that may be on other stages. Name in blocks= a "
        "module that calls all these blocks and does this, so that they are on one stage"
    )


def calling_line() -> str:
    """Return the file and line of the model's code that runs now."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "penstock.")) and module != "torch":
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return "unknown line"
