"""What modules keep in Python, and running them so that nothing of it shows afterwards."""

import operator
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import MemberDescriptorType, ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn

_T = TypeVar("_T")

UNCOUNTED = frozenset(name for name in vars(nn.Module()) if name.endswith("hooks"))
LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "penstock"))
_PARTS_OF_LAYERS = ("torch", "penstock")
"""Whose hooks are part of what a module computes, as those of weight_norm."""


@contextmanager
def unnoticed(modules: Sequence[nn.Module], *, hooks: bool = False) -> Iterator[None]:
    """Run modules without a trace in Python.

    Attributes, with all that is in lists, dicts and plain objects there, the generators of torch,
    `random` and NumPy, and the filters of warnings are afterwards what they were; hooks of the
    user do not run (unless `hooks`), and warnings are left for the step that comes.  A copy of the
    modules would leave what they share with others behind, and take their memory twice; to
    measure in the first real step would cut the layers for no reason anew.  What a module keeps
    elsewhere is not put back: variables of closures, global variables, files.
    """
    owners = list(dict.fromkeys(owner for module in modules for owner in module.modules()))
    with ExitStack() as after:
        after.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        after.enter_context(keeping_generators())
        after.callback(put_back, kept_by(owners))
        if not hooks:
            _take_off_hooks(owners)
        yield


def run_unnoticed(modules: Sequence[nn.Module], run: Callable[[], _T]) -> _T:
    """Return what `run` does with modules, unnoticed.  Where they fail without the user's hooks it
    runs again with them: one may give a layer what it needs.
    """
    try:
        with unnoticed(modules):
            return run()
    except Exception:
        if not any(_own_hooks(owner) for module in modules for owner in module.modules()):
            raise
    with unnoticed(modules, hooks=True):
        return run()


def _take_off_hooks(owners: Iterable[nn.Module]) -> None:
    for owner in owners:
        for held, key in _own_hooks(owner):
            del held[key]


def _own_hooks(owner: nn.Module) -> list[tuple[dict[Any, Any], Any]]:
    """List the hooks of one module that are the user's: where each is held, and by what key."""
    held = (kept for name, kept in vars(owner).items() if name in UNCOUNTED and kept)
    return [(hooks, key) for hooks in held for key, hook in hooks.items() if _is_own(hook)]


def _is_own(hook: Any) -> bool:
    origin = getattr(hook, "__module__", None) or ""
    return origin.partition(".")[0] not in _PARTS_OF_LAYERS


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Restore the generators of `random`, NumPy and torch afterwards."""
    with ExitStack() as after:
        after.callback(random.setstate, random.getstate())
        after.callback(numpy.random.set_state, numpy.random.get_state())
        after.enter_context(torch.random.fork_rng(list(range(torch.cuda.device_count()))))
        yield


def holders(values: list[Any]) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """Yield containers and plain objects, and those in them, each once, with what it holds."""
    seen: set[int] = set()
    while values:
        holder = values.pop()
        content = None if id(holder) in seen else _content(holder)
        if content is not None:
            seen.add(id(holder))
            yield holder, content
            values.extend(content.values())


def _content(holder: Any) -> dict[Any, Any] | None:
    """Return what a container or plain object holds, by key, place or name; None of others."""
    if isinstance(holder, dict):
        return dict(dict.items(holder))  # a subclass may make what it gives
    if isinstance(holder, list | tuple | set | deque):
        return dict(enumerate(holder))
    kind: type = type(holder)
    return fields_of(holder) if is_plain(kind) else None


def fields_of(value: Any) -> dict[str, Any]:
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
    """Tell whether objects of a class hold attributes of the user's, and no more."""
    if not is_of_user(kind):
        return kind is SimpleNamespace
    return not issubclass(kind, type | ModuleType | Tensor | nn.Module)


def is_of_user(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in LIBRARIES


def kept_by(modules: Iterable[nn.Module]) -> list[tuple[Any, dict[Any, Any]]]:
    """Note what modules keep, in attributes and in containers and plain objects there."""
    return [
        (holder, content)
        for holder, content in holders([vars(module) for module in modules])
        if not isinstance(holder, tuple)
    ]


def put_back(kept: Iterable[tuple[Any, dict[Any, Any]]]) -> None:
    """Restore what modules, containers and plain objects held; see `kept_by`."""
    for holder, content in kept:
        now = _content(holder) or {}
        same = [*now] == [*content] and all(map(operator.is_, now.values(), content.values()))
        if not same:
            _refill(holder, now, content)


def _refill(holder: Any, now: dict[Any, Any], content: dict[Any, Any]) -> None:
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
            for name in now.keys() - content.keys():
                object.__delattr__(holder, name)
            for name, value in content.items():
                object.__setattr__(holder, name, value)
