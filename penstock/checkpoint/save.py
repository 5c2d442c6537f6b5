"""Save a model, its optimizer and whatever else a run needs to go on."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.pipeline import Pipeline

from .files import MODEL, OPTIMIZER, write_folder
from .optimizer_state import pack_optimizer


def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    **state: Any,
) -> None:
    """Save `module`, a Pipeline or any nn.Module, as a folder that appears whole or not at all.

    The tensors go under the model's own names: the unsplit model and a pipeline of any other
    number of stages load them.  A tensor with several names is stored under each, so that a plain
    `load_state_dict` of model.safetensors works.  A pipeline's step count and seed are saved as
    well, for its random streams.  `state` is anything JSON can hold (tuples come back as lists).

    Raises:
        CheckpointError: `path` exists; `state` is not JSON; the optimizer is not the module's; the
            disk is full or refuses.
    """
    tensors = {MODEL: _storable(module.state_dict())}
    facts: dict[str, Any] = {"pipeline": None, "optimizer": None, "state": state}
    if isinstance(module, Pipeline):
        facts["pipeline"] = {"step": module.step, "seed": module.seed}
    if optimizer is not None:
        content, facts["optimizer"] = pack_optimizer(optimizer, module)
        tensors[OPTIMIZER] = _storable(content)
    write_folder(Path(path), tensors, facts)


def _storable(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Give contiguous tensors, no two of which share memory, as safetensors wants them."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{name!r} in the model's state is a {type(tensor).__name__}; only tensors can be "
                "saved. Register it as a buffer, or leave it out of the state"
            )
        storage = tensor.untyped_storage().data_ptr()
        plain = tensor.detach().contiguous()
        result[name] = plain.clone() if storage in seen else plain
        seen.add(storage)
    return result
