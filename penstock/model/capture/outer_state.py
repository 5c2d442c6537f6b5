"""What a model's own forward changes outside its blocks, and so on every stage."""

import random
import sys
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FunctionType, MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.model.state import attributes, keeping_values, tensors_at
from penstock.torch_private import BUFFERS, PARAMETERS, version_counter, without_cached_weights

from .exported import Exported
from .ghost import Ghost

Outer = dict[tuple[str, str], tuple[Any, int, tuple[Any, ...]]]
"""(name of a module, name of an attribute) -> its value, its version if it is a tensor, and what
it holds if it is a container or a plain object, and what is in those."""
UNCOUNTED = frozenset(name for name in vars(nn.Module()) if name.endswith("hooks"))
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "penstock"))
_COMPARED = (bool, int, float, complex, str)


def outer_state(model: nn.Module, blocks: Collection[nn.Module]) -> Outer:
    """Note all attributes of the modules that are not inside blocks, and what these hold.

    Attributes of their classes, and the global variables that the methods name, are noted too.
    """
    found: Outer = {}
    for path, module in outside(model, blocks):
        for name, value in _attributes(module):
            content = tuple(
                part
                for holder, entries in _holders([value])
                for part in (type(holder), *entries, *map(_version, entries))
            )
            found[path, name] = value, _version(value), content
    return found


def outside(model: nn.Module, blocks: Collection[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are not inside blocks, with their paths."""
    inside = {id(part) for block in blocks for part in block.modules()}
    yield from ((path, m) for path, m in model.named_modules() if id(m) not in inside)


def _holders(values: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield containers and plain objects, and those in them, each once, with what it holds."""
    seen: set[int] = set()
    while values:
        holder = values.pop()
        entries = _entries(holder)
        if entries is not None and id(holder) not in seen:
            seen.add(id(holder))
            yield holder, entries
            values.extend(entries)


def _entries(value: Any) -> list[Any] | None:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | deque):
        return [*value]
    kind: type = type(value)
    return [*fields(value).values()] if is_plain(kind) else None


def fields(value: Any) -> dict[str, Any]:
    """Return the attributes of a plain object, also those in slots."""
    slots = (
        name
        for kind in type(value).__mro__
        for name, kept in vars(kind).items()
        if isinstance(kept, MemberDescriptorType) and name != "__dict__" and hasattr(value, name)
    )
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}


@cache
def is_plain(kind: type) -> bool:
    """Whether objects of a class hold attributes of the user's, and no more."""
    if not _is_of_user(kind):
        return kind is SimpleNamespace
    return not issubclass(kind, type | ModuleType | Tensor | nn.Module)


def _is_of_user(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _LIBRARIES


def _version(value: Any) -> int:
    is_plain = isinstance(value, Tensor) and type(value) is not Ghost
    return version_counter(value) if is_plain else 0


def _is_same(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    alike = len(old[2]) == len(new[2]) and all(map(_are_alike, old[2], new[2]))
    return _are_alike(old[0], new[0]) and old[1] == new[1] and alike


def _are_alike(one: Any, other: Any) -> bool:
    return one is other or (
        type(one) is type(other) and isinstance(one, _COMPARED) and bool(one == other)
    )


def kept_by(modules: Iterable[nn.Module]) -> list[tuple[Any, Any]]:
    """Note what modules keep, in attributes and in containers and plain objects there."""
    found = (holder for holder, _ in _holders([vars(module) for module in modules]))
    return [(holder, _content(holder)) for holder in found if not isinstance(holder, tuple)]


def put_back(kept: list[tuple[Any, Any]]) -> None:
    """Give modules, containers and plain objects the content that they had; see `kept_by`."""
    for holder, content in kept:
        now = _content(holder)
        if len(now) == len(content) and all(map(_is_entry, now.items(), content.items())):
            continue
        if isinstance(holder, dict | set | list | deque):
            holder.clear()
        match holder:
            case dict():
                holder.update(content)
            case set():
                holder.update(content.values())
            case list() | deque():
                holder.extend(content.values())
            case _:
                _put_fields_back(holder, now, content)


def _put_fields_back(holder: Any, now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in now.keys() - before.keys():
        object.__delattr__(holder, name)
    for name, value in before.items():
        object.__setattr__(holder, name, value)


def _content(holder: Any) -> dict[Any, Any]:
    """Return what is in a holder, by its key or place."""
    if isinstance(holder, dict):
        return dict(holder)
    if isinstance(holder, list | set | deque):
        return dict(enumerate(holder))
    return fields(holder)


def _is_entry(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[1] is other[1] and (one[0] is other[0] or bool(one[0] == other[0]))


@contextmanager
def as_it_was(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run the model in one mode, and leave it as it was: modes, buffers, random states."""
    modules = list(model.modules())
    with ExitStack() as after:
        after.enter_context(without_cached_weights())
        after.enter_context(warnings.catch_warnings())  # of a checkpoint that sees no gradients
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        after.callback(random.setstate, random.getstate())
        after.callback(numpy.random.set_state, numpy.random.get_state())
        after.enter_context(torch.random.fork_rng(list(range(torch.cuda.device_count()))))
        after.enter_context(keeping_values([*model.buffers(), *tensors_at(attributes(modules))]))
        kept = modules
        if isinstance(model, Exported):  # its mode is that of what was exported
            kept = [*modules, *model.original.modules()]
        after.callback(put_back, kept_by(kept))
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
        if _is_of_user(kind):
            yield from _of_class(kind)


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class, and the global variables that its methods name."""
    for name, value in vars(kind).items():
        if isinstance(value, FunctionType):
            known = value.__globals__
            yield from ((f"global {n}", known[n]) for n in value.__code__.co_names if n in known)
        elif not name.startswith("__"):
            yield f"{kind.__name__}.{name}", value


def check_unchanged(before: Outer, after: Outer) -> None:
    """Refuse a model whose own code, outside blocks, changes what it keeps.

    Raises:
        CutError: names the attribute.
    """
    for place in {**before, **after}:
        old, new = before.get(place), after.get(place)
        if old is not None and new is not None and _is_same(old, new):
            continue
        module, name = place
        if old is None and new is not None and new[0] is True:  # a flag, set once and for all
            continue
        raise changed_outside(module, name)


class OwnState(CutError):
    """A module that is no block changes what it keeps; `path` names it, "" where it is not one."""

    def __init__(self, message: str, path: str, name: str) -> None:
        super().__init__(message)
        self.path, self.name = path, name


def changed_outside(module: str, name: str) -> OwnState:
    """Make the error for code between blocks that changes what a module keeps."""
    where = f"the forward of '{module}'" if module else "the forward of the model itself"
    return OwnState(
        f"{where} changes its '{name}', and it is no block: every stage would do so, for each "
        "micro-batch, in its own time. Keep it in a local variable, or put it into an nn.Module "
        "with parameters",
        module if name.isidentifier() else "",  # no attribute of a class, no global variable
        name,
    )


def is_kept_by_one(model: nn.Module, path: str, name: str) -> bool:
    """Tell whether a module's attribute holds nothing that modules elsewhere refer to."""
    module = model.get_submodule(path)
    inside = {id(part) for part in module.modules()}
    own = {id(holder) for holder, _ in _holders([getattr(module, name, None)])}
    others = (vars(m) for m in model.modules() if id(m) not in inside)
    return not any(id(holder) in own for holder, _ in _holders([*others]))
