"""Extra state of modules beside tensors: torch's `get_extra_state`, `set_extra_state`.

A checkpoint stores a tensor among its tensors, and any other value as JSON.
"""

import json
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import CheckpointError

_KEY = "_extra_state"
"""The last part of the name of extra state in a state dict."""

Owners = Mapping[str, nn.Module]
"""The modules with extra state, by the name of the state in a state dict."""


def find_owners(model: nn.Module, elsewhere: Iterable[str] = ()) -> Owners:
    """Find the modules with extra state, except inside the modules named in `elsewhere`."""
    others = tuple(f"{name}." for name in elsewhere)
    owners = {}
    for path, module in model.named_modules(remove_duplicate=False):
        name = f"{path}.{_KEY}" if path else _KEY
        if _overrides(module, "get_extra_state") and not name.startswith(others):
            owners[name] = module
    return owners


def read_extra(owners: Owners) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return extra state: tensors, and values read back from JSON; CheckpointError if unlike."""
    states = {name: module.get_extra_state() for name, module in owners.items()}
    tensors = {name: value for name, value in states.items() if isinstance(value, Tensor)}
    others = {name: value for name, value in states.items() if name not in tensors}
    return tensors, {name: _as_json(name, value, owners[name]) for name, value in others.items()}


def extra_faults(owners: Owners, there: Collection[str]) -> Iterator[str]:
    """Yield a message for each saved state, with a name in `there`, that cannot be loaded."""
    for name, module in owners.items():
        if name in there and not _overrides(module, "set_extra_state"):
            kind = type(module).__name__
            yield f"{name} cannot be loaded: {kind} has get_extra_state and no set_extra_state"


def set_extra(owners: Owners, saved: Mapping[str, Any]) -> None:
    """Load the saved extra state into the modules."""
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
