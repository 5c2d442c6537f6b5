"""Load what `save_checkpoint` wrote; all of it is checked first, so nothing is half loaded."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.pipeline import Pipeline

from .files import MODEL, OPTIMIZER, read_facts, read_tensors
from .optimizer_state import check_optimizer, unpack_optimizer

_MOST_FAULTS = 100


def load_checkpoint(
    path: str | os.PathLike[str], module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load the folder `path` into `module` (a Pipeline or any nn.Module) and `optimizer`.

    A pipeline gets its step count and seed back, so that its random streams go on.  Nothing is
    unpickled, and nothing is touched unless everything fits.

    Returns:
        The `state` that `save_checkpoint` was given.

    Raises:
        CheckpointError: not a checkpoint, damaged, or of another model or optimizer; lists every
            tensor that is missing, unexpected or of another shape or type.
    """
    path = Path(path)
    facts = read_facts(path)
    tensors = read_tensors(path, MODEL)
    faults = _model_faults(module.state_dict(), tensors)
    optimizer_tensors: dict[str, Tensor] = {}
    if optimizer is not None:
        if facts["optimizer"] is None:
            raise CheckpointError(
                f"{path} was saved without an optimizer; load it without one to start a new one"
            )
        optimizer_tensors = read_tensors(path, OPTIMIZER)
        faults += check_optimizer(optimizer, module, facts["optimizer"], optimizer_tensors)
    if faults:
        raise CheckpointError(_foreign(path, faults))
    module.load_state_dict(tensors)
    if optimizer is not None:
        unpack_optimizer(optimizer, module, facts["optimizer"], optimizer_tensors)
    if isinstance(module, Pipeline) and facts["pipeline"] is not None:
        module.step, module.seed = facts["pipeline"]["step"], facts["pipeline"]["seed"]
    state: dict[str, Any] = facts["state"]
    return state


def _model_faults(here: Mapping[str, Any], there: Mapping[str, Tensor]) -> list[str]:
    faults = [f"{name} is missing" for name in here if name not in there]
    faults += [f"{name} is not in the model" for name in there if name not in here]
    first_name: dict[tuple[int, torch.Size], str] = {}
    for name in (name for name in here if name in there):
        mine, saved = here[name], there[name]
        if mine.shape != saved.shape or mine.dtype != saved.dtype:
            faults.append(f"{name} is {_kind(saved)}, the model's is {_kind(mine)}")
        first = first_name.setdefault((mine.data_ptr(), mine.shape), name)
        if first != name and not torch.equal(there[first], saved):
            faults.append(f"{name} and {first} are one tensor in the model but differ")
    return faults


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _foreign(path: Path, faults: list[str]) -> str:
    lines = [f"  {fault}" for fault in faults[:_MOST_FAULTS]]
    if len(faults) > _MOST_FAULTS:
        lines.append(f"  and {len(faults) - _MOST_FAULTS} more")
    return "\n".join(
        [f"{path} is of another model or optimizer; build the one it was saved from:", *lines]
    )
