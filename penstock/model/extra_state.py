"""Extra state that modules save beside tensors: torch's `get_extra_state`, `set_extra_state`.

A value that is a tensor stands in a file of tensors, any other as JSON beside it.
"""

import json
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import CheckpointError

_KEY = "_extra_state"
"""The last part of its name in a state dict."""

Owners = Mapping[str, nn.Module]
"""The modules with extra state, by its names in a state dict."""


def find_owners(model: nn.Module, elsewhere: Iterable[str] = ()) -> Owners:
    """Find the modules with extra state, but for those in the modules that `elsewhere` names."""
    others = tuple(f"{name}." for name in elsewhere)
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        name = f"{path}.{_KEY}" if path else _KEY
        if _overrides(module, "get_extra_state") and not name.startswith(others):
            found[name] = module
    return found


def without_extra(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict without all extra state."""
    names = find_owners(model)
    return {name: value for name, value in state.items() if name not in names}


def read_extra(owners: Owners) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what the modules have to save: tensors, and values as JSON gives them back.

    Raises:
        CheckpointError: one is no tensor, and would not be the same.
    """
    found = {name: module.get_extra_state() for name, module in owners.items()}
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in found.items() if name not in tensors}
    return tensors, {name: _as_json(name, value, owners[name]) for name, value in others.items()}


def extra_faults(owners: Owners, there: Collection[str]) -> Iterator[str]:
    """Yield what keeps saved values, with the names `there`, from being given to the modules."""
    for name, module in owners.items():
        if name in there and not _overrides(module, "set_extra_state"):
            kind = type(module).__name__
            yield f"{name} cannot be loaded: {kind} has get_extra_state and no set_extra_state"


def set_extra(owners: Owners, saved: Mapping[str, Any]) -> None:
    """Hand the modules what they saved."""
    for name, module in owners.items():
        if name in saved:
            module.set_extra_state(saved[name])


def _overrides(module: nn.Module, method: str) -> bool:
    return getattr(type(module), method) is not getattr(nn.Module, method)


def _as_json(name: str, value: Any, module: nn.Module) -> Any:
    try:
        read = json.loads(json.dumps(value))
        if read == value:
            return read
        why = f"JSON gives {reprlib.repr(read)} back for {reprlib.repr(value)}"
    except (TypeError, ValueError, RecursionError) as error:
        why = str(error)
    raise CheckpointError(
        f"{name}: get_extra_state of {type(module).__name__} returned a {type(value).__name__} "
        f"that would not come back as it is ({why}). Return a tensor, or None, numbers, strings, "
        "and lists and dicts (with strings as keys) of them; make the rest of it in "
        "set_extra_state, or keep tensors as buffers"
    )
