"""Read and restore buffers, tensor attributes and modes of modules; list a process's tensors.

Modules return extra state beside tensors by torch's `get_extra_state`, and take it back by
`set_extra_state`.  A checkpoint stores a tensor of it among its tensors, other values as JSON.
"""

import json
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.torch_private import buffers_of

from .owned import LOSS
from .pytree import Sealed

Place = tuple[nn.Module, bool, str]
"""(module, is a buffer and no plain attribute, name) of a tensor that a module holds."""

ABSENT = object()
"""The value of a place without a tensor."""


def attributes(modules: Iterable[nn.Module]) -> list[Place]:
    """Find the tensors that are plain attributes of the given modules, and have values."""
    return [
        (module, False, name)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not isinstance(value, Sealed)
    ]


def first_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the first name of each tensor, by each of its names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def read_state(
    modules: Iterable[nn.Module], places: Iterable[Place]
) -> dict[Place, Tensor | None]:
    """Return all buffers of `modules`, and the tensors at `places`; None for no tensor."""
    now: dict[Place, Tensor | None] = {
        (m, True, name): buffer for m in modules for name, buffer in buffers_of(m).items()
    }
    for place in places:
        value = standing_at(place)
        now[place] = value if isinstance(value, Tensor) else None
    return now


def holder(place: Place) -> dict[str, Any]:
    """Return the dictionary that holds the tensor."""
    module, is_buffer, _ = place
    return buffers_of(module) if is_buffer else vars(module)


def standing_at(place: Place) -> Any:
    """Return the value at a place, or `ABSENT`."""
    held = holder(place)
    is_there = place[2] in held  # the buffers of a scripted module have no `get`
    return held[place[2]] if is_there else ABSENT


def put_state(state: Mapping[Place, Any]) -> None:
    """Put tensors back, and remove values that were `ABSENT`."""
    for place, tensor in state.items():
        if tensor is ABSENT:
            holder(place).pop(place[2], None)
        else:
            holder(place)[place[2]] = tensor


@contextmanager
def in_evaluation(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode, and restore the mode of each afterwards."""
    before = [(module, module.training) for module in modules]
    for module, _ in before:
        module.training = False
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def keeping_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the values of tensors afterwards."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)


# -- extra state ----------------------------------------------------------------------------------

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


# -- the tensors of a process ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """The tensors of `module`, and the extra state of `original` except in modules `elsewhere`.

    `original` is the model, and `loss` the pipeline's loss.  `names` are the names of all
    parameters in the model's order.  With `is_part`, this process has a part of the model, and
    tensors without memory belong to other processes.
    """

    module: nn.Module
    original: nn.Module
    elsewhere: tuple[str, ...] = ()
    is_part: bool = False
    loss: Any = None
    names: Sequence[str] = ()

    def is_of_loss(self, name: str) -> bool:
        """Tell whether a tensor's name belongs to the pipeline's loss, and not to the model."""
        child = dict(self.original.named_children()).get(LOSS)
        return name.startswith(f"{LOSS}.") and (child is None or child is self.loss)

    @property
    def owners(self) -> Owners:
        """The modules with extra state that this process runs."""
        return find_owners(self.original, self.elsewhere)

    def state(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """Return the state dict without extra state, and without tensors of other processes."""
        extra, whole = find_owners(self.original), self.module.state_dict(keep_vars=keep_vars)
        state = {name: value for name, value in whole.items() if name not in extra}
        if not self.is_part:
            return state
        return {n: v for n, v in state.items() if not (isinstance(v, Tensor) and v.is_meta)}

    def own_tensors(self) -> dict[tuple[str, ...], Tensor]:
        """Return the tensors of `state` without the loss's, each by all its names."""
        names: dict[int, list[str]] = {}
        state = self.state(keep_vars=True)
        own = {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and not self.is_of_loss(name)
        }
        for name, tensor in own.items():
            names.setdefault(id(tensor), []).append(name)
        return {tuple(alike): own[alike[0]] for alike in names.values()}
