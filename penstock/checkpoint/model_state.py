"""A module's state, as checkpoints keep it: its tensors, and what modules save beside them."""

from typing import Any

from torch import Tensor, nn

from penstock.model.extra_state import Owners, find_owners, without_extra
from penstock.pipeline import Pipeline


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict without extra state."""
    whole = module.original if isinstance(module, Pipeline) else module
    return without_extra(module.state_dict(), whole)


def state_here(module: nn.Module) -> dict[str, Any]:
    """Return `state_of` without the tensors whose values another process has: in a captured
    model these are there, on the meta device.
    """
    state = state_of(module)
    return {n: v for n, v in state.items() if not (isinstance(v, Tensor) and v.is_meta)}


def owners_here(module: nn.Module) -> Owners:
    """Find the modules with extra state that this process runs."""
    return module.loadable.owners if isinstance(module, Pipeline) else find_owners(module)
