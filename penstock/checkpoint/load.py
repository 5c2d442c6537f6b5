"""Load what `save_checkpoint` wrote; all of it is checked first, so nothing is half loaded."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.mesh import Mesh
from penstock.pipeline import Pipeline

from .files import MODEL, OPTIMIZER, read_facts, read_some, read_tensors, tensor_kinds
from .optimizer_state import (
    check_optimizer,
    keys_of,
    names_of_share,
    only_of,
    parameter_names,
    unpack_optimizer,
)

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
    mesh = module.mesh if isinstance(module, Pipeline) else None
    if mesh is not None and mesh.is_distributed:
        return _load_into_many(path, mesh, module, optimizer)
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
    return _put(module, optimizer, facts, tensors, optimizer_tensors)


def _put(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    facts: dict[str, Any],
    tensors: dict[str, Tensor],
    optimizer_tensors: dict[str, Tensor],
) -> dict[str, Any]:
    module.load_state_dict(tensors)
    if optimizer is not None:
        unpack_optimizer(optimizer, module, facts["optimizer"], optimizer_tensors)
    if isinstance(module, Pipeline) and facts["pipeline"] is not None:
        module.step, module.seed = facts["pipeline"]["step"], facts["pipeline"]["seed"]
    state: dict[str, Any] = facts["state"]
    return state


def _load_into_many(
    path: Path, mesh: Mesh, module: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Let each process read what its own stage needs; all of them refuse what one must refuse."""
    here = module.state_dict()
    facts, tensors, optimizer_tensors, faults = {}, {}, {}, []
    problem: str | None = None
    try:
        facts = read_facts(path, check=mesh.is_first_rank)
        tensors = read_some(path, MODEL, here)
        faults = [f for f in _model_faults(here, tensors) if not f.endswith(_NOT_IN_MODEL)]
        if optimizer is not None and facts["optimizer"] is None:
            faults.append("it was saved without an optimizer; load it without one")
        elif optimizer is not None:
            facts["optimizer"] = only_of(facts["optimizer"], parameter_names(module).values())
            mine = keys_of(names_of_share(optimizer, module), tensor_kinds(path, OPTIMIZER))
            optimizer_tensors = read_some(path, OPTIMIZER, mine)
            faults += check_optimizer(optimizer, module, facts["optimizer"], optimizer_tensors)
    except Exception as error:
        problem = str(error)
    assert isinstance(module, Pipeline)
    mesh.begin_call("load_checkpoint", module.number)
    parts = mesh.gather((problem, faults, set(here)), "for the others to load the same checkpoint")
    if problems := [said for said, _, _ in parts if said is not None]:
        raise CheckpointError("; ".join(dict.fromkeys(problems)))
    faults = [fault for _, said, _ in parts for fault in said]
    if not faults:
        known = set().union(*(names for _, _, names in parts))
        there = tensor_kinds(path, MODEL)
        faults = [f"{name}{_NOT_IN_MODEL}" for name in there if name not in known]
    if faults:
        raise CheckpointError(_foreign(path, list(dict.fromkeys(faults))))
    return _put(module, optimizer, facts, tensors, optimizer_tensors)


_NOT_IN_MODEL = " is not in the model"


def _model_faults(here: Mapping[str, Any], there: Mapping[str, Tensor]) -> list[str]:
    faults = [f"{name} is missing" for name in here if name not in there]
    faults += [f"{name}{_NOT_IN_MODEL}" for name in there if name not in here]
    first_name: dict[tuple[int, torch.Size], str] = {}
    for name in (name for name in here if name in there):
        mine, saved = here[name], there[name]
        if mine.shape != saved.shape or mine.dtype != saved.dtype:
            faults.append(f"{name} is {_kind(saved)}, the model's is {_kind(mine)}")
        if mine.is_meta:
            faults.append(f"{name} has no memory in the model: it is on the meta device")
            continue
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
