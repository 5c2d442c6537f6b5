"""What a model's own forward changes outside its blocks, and so on every stage.

Settings are no such change: flags, and plain values that a first forward puts where there was
nothing or None, as transformers models do with `config.problem_type`, read off their labels.
Every stage sets the same, as long as later forwards leave it alone.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.model.compare import is_same_plain
from penstock.model.kept import UNCOUNTED, as_before, holders, is_of_user, is_plain
from penstock.torch_private import BUFFERS, PARAMETERS, version_counter, without_cached_weights

from .ghost import Ghost

_SETTINGS = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
_IS_IMMUTABLE = 1 << 8
"""Flag of a class written in C: whether its objects are set again cannot be seen."""


class Slot(NamedTuple):
    """A place in an object that keeps something, what is there, and its version if it is a tensor.

    `path` and `name` say which module led there, and by which attribute.
    """

    holder: Any
    key: Any
    value: Any
    version: int
    path: str
    name: str


Slots = Mapping[tuple[int, Any], Slot]
"""Slots by the id of their holder and their key in it."""


def slots_outside(model: nn.Module, blocks: Collection[nn.Module]) -> Slots:
    """List the attributes of the modules that are not inside blocks, and all that these hold.

    Attributes of their classes, and the global variables that the methods name, are there too.
    """
    found: dict[tuple[int, Any], Slot] = {}
    inside = {id(part) for block in blocks for part in block.modules()}
    outside = ((path, m) for path, m in model.named_modules() if id(m) not in inside)
    attributes = ((path, m, *kept) for path, m in outside for kept in _attributes(m))
    for path, module, name, value in attributes:
        for holder, content in ((module, {name: value}), *holders([value])):
            for key, part in content.items():
                slot = Slot(holder, key, part, _version(part), path, name)
                found.setdefault((id(holder), key), slot)
    return found


def new_settings(before: Slots, after: Slots) -> list[Slot]:
    """List the settings that were made between two looks at a model.

    Raises:
        OwnState: something else has changed.
    """
    settings = []
    for place in {**before, **after}:
        old, new = before.get(place), after.get(place)
        if old is not None and new is not None and _is_same(old, new):
            continue
        if new is not None and _is_setting(old, new):
            settings.append(new)
            continue
        # a flag of a module or its class, set once and for all
        is_flag = new is not None and new.value is True and isinstance(new.holder, nn.Module)
        if old is not None or not is_flag:
            is_tensor = new is not None and new.key == new.name and isinstance(new.value, Tensor)
            raise changed_outside(*(new or before[place])[-2:], is_tensor=is_tensor)
    return settings


def _is_same(one: Slot, other: Slot) -> bool:
    alike = one.value is other.value or is_same_plain(one.value, other.value)
    return alike and one.version == other.version


def _is_setting(old: Slot | None, new: Slot) -> bool:
    kind: type = type(new.holder)
    shows_sets = is_plain(kind) and not kind.__flags__ & _IS_IMMUTABLE
    if not isinstance(new.holder, nn.Module) and not shows_sets:
        return False
    if old is None or old.value is None:
        return str(new.key).isidentifier() and isinstance(new.value, _SETTINGS)
    return isinstance(old.value, bool) and isinstance(new.value, bool)


@contextmanager
def set_again(settings: Iterable[Slot]) -> Iterator[list[str]]:
    """Note the names of settings of plain objects that are set once more inside."""
    found: list[str] = []
    places = {(id(slot.holder), slot.key) for slot in settings}
    with ExitStack() as after:
        for kind in {type(s.holder) for s in settings if not isinstance(s.holder, nn.Module)}:
            own = vars(kind).get("__setattr__")
            setattr(kind, "__setattr__", _noting(kind.__setattr__, places, found))  # noqa: B010 - mypy knows its type
            after.callback(_give_back, kind, own)
        yield found


def _noting(native: Any, places: Collection[tuple[int, str]], found: list[str]) -> Any:
    def write(holder: Any, name: str, value: Any) -> None:
        if (id(holder), name) in places:
            found.append(name)
        native(holder, name, value)

    return write


def _give_back(kind: type, own: Any) -> None:
    if own is None:
        del kind.__setattr__
    else:
        setattr(kind, "__setattr__", own)  # noqa: B010 - as above


def _version(value: Any) -> int:
    is_plain = isinstance(value, Tensor) and type(value) is not Ghost
    return version_counter(value) if is_plain else 0


@contextmanager
def as_it_was(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run the model in one mode, and leave it as it was: modes, buffers, random states."""
    with without_cached_weights(), warnings.catch_warnings(), as_before([model]):
        # of a checkpoint that sees no gradients
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        if model.training != training:
            model.train(training)
        yield


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name in (BUFFERS, PARAMETERS):
            yield from ((key, tensor) for key, tensor in value.items() if tensor is not None)
        elif name not in UNCOUNTED:
            yield name, value
    for kind in type(module).__mro__:
        if is_of_user(kind):
            yield from _of_class(kind)


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class, and the global variables that its methods name."""
    for name, value in vars(kind).items():
        if isinstance(value, FunctionType):
            known = value.__globals__
            yield from ((f"global {n}", known[n]) for n in value.__code__.co_names if n in known)
        elif not name.startswith("__"):
            yield f"{kind.__name__}.{name}", value


class OwnState(CutError):
    """A module that is no block changes what it keeps; `path` names it, "" where it is not one."""

    def __init__(self, message: str, path: str, name: str) -> None:
        super().__init__(message)
        self.path, self.name = path, name


def changed_outside(module: str, name: str, *, is_tensor: bool = False) -> OwnState:
    """Make the error for code between blocks that changes what a module keeps."""
    at = f"model.{module}" if module else "model"
    forgotten = (
        ". Where only generation reads it, not training, let the class forget it: "
        f"type({at}).{name} = property(lambda self: None, lambda self, value: None)"
    )
    where = f"the forward of '{module}'" if module else "the forward of the model itself"
    return OwnState(
        f"{where} changes its '{name}', and it is no block: every stage would do so, for each "
        "micro-batch, in its own time. Keep it in a local variable, or put it into an nn.Module "
        f"with parameters{forgotten if is_tensor else ''}",
        module if name.isidentifier() else "",  # no attribute of a class, no global variable
        name,
    )


def is_kept_by_one(model: nn.Module, path: str, name: str) -> bool:
    """Tell whether a module's attribute holds nothing that modules elsewhere refer to."""
    module = model.get_submodule(path)
    inside = {id(part) for part in module.modules()}
    own = {id(holder) for holder, _ in holders([getattr(module, name, None)])}
    others = (vars(m) for m in model.modules() if id(m) not in inside)
    return not any(id(holder) in own for holder, _ in holders([*others]))
