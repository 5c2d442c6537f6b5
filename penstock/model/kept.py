"""Run modules, and restore their state afterwards."""

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

from .state import attributes, keeping_values, put_state, read_state

_T = TypeVar("_T")

UNCOUNTED = frozenset(name for name in vars(nn.Module()) if name.endswith("hooks"))
"""Attributes of a module that hold hooks."""
LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "penstock"))
"""Packages whose classes and functions are not the user's."""
_PARTS_OF_LAYERS = ("torch", "penstock")
"""Packages whose hooks are part of a module, such as those of weight_norm."""


@contextmanager
def as_before(modules: Iterable[nn.Module], *, values: bool = True) -> Iterator[None]:
    """Restore the state of modules, and the generators of torch, `random` and NumPy.

    Attributes are restored, with the content of lists, dicts and plain objects in them.  With
    `values`, the values of buffers and of tensor attributes are restored too.  A copy of the
    modules would take their memory twice, and separate state that they share with others.
    Closures, global variables and files are not restored.
    """
    owners = list(dict.fromkeys(owner for module in modules for owner in module.modules()))
    state = read_state(owners, attributes(owners)) if values else {}
    with ExitStack() as after:
        after.enter_context(keeping_values(t for t in state.values() if t is not None))
        after.enter_context(keeping_generators())
        # Callbacks run in reverse: attributes come back first, then tensors, then their values.
        after.callback(put_state, state)  # buffers of a scripted module are in no Python dict
        after.callback(put_back, kept_by(owners))
        yield


@contextmanager
def unnoticed(modules: Sequence[nn.Module], *, hooks: bool = False) -> Iterator[None]:
    """Run modules without side effects in Python; values of tensors are not restored.

    The user's hooks do not run (unless `hooks`).  Warnings are ignored here, and shown by the
    first real step.
    """
    with warnings.catch_warnings(), as_before(modules, values=False):
        warnings.simplefilter("ignore")
        if not hooks:
            for held, key in _own_hooks(modules):
                del held[key]
        yield


def run_unnoticed(modules: Sequence[nn.Module], run: Callable[[], _T]) -> _T:
    """Return the result of `run` on modules, without side effects.

    If they fail without the user's hooks, it runs again with them: a layer may need its hook.
    """
    try:
        with unnoticed(modules):
            return run()
    except Exception:
        if not _own_hooks(modules):
            raise
    with unnoticed(modules, hooks=True):
        return run()


def _own_hooks(modules: Iterable[nn.Module]) -> list[tuple[dict[Any, Any], Any]]:
    """List the user's hooks, each as its dictionary and its key."""
    owners = dict.fromkeys(owner for module in modules for owner in module.modules())
    held = (hooks for owner in owners for n, hooks in vars(owner).items() if n in UNCOUNTED)
    return [
        (hooks, key)
        for hooks in held
        for key, hook in (hooks or {}).items()
        if (getattr(hook, "__module__", None) or "").partition(".")[0] not in _PARTS_OF_LAYERS
    ]


@contextmanager
def keeping_generators() -> Iterator[None]:
    """Restore the generators of `random`, NumPy and torch afterwards."""
    with ExitStack() as after:
        after.callback(random.setstate, random.getstate())
        after.callback(numpy.random.set_state, numpy.random.get_state())
        after.enter_context(torch.random.fork_rng(list(range(torch.cuda.device_count()))))
        yield


def holders(values: list[Any]) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """Yield containers and plain objects, and those in them, each once with its content."""
    seen: set[int] = set()
    while values:
        holder = values.pop()
        content = None if id(holder) in seen else _content(holder)
        if content is not None:
            seen.add(id(holder))
            yield holder, content
            values.extend(content.values())


def _content(holder: Any) -> dict[Any, Any] | None:
    """Return the content of a container or plain object by key, place or name; else None."""
    if isinstance(holder, dict):
        return dict(dict.items(holder))  # a subclass may compute its items
    if isinstance(holder, list | tuple | set | deque):
        return dict(enumerate(holder))
    kind: type = type(holder)
    return fields_of(holder) if is_plain(kind) else None


def fields_of(value: Any) -> dict[str, Any]:
    """Return the attributes of a plain object, also in slots."""
    slots = (
        name
        for kind in type(value).__mro__
        for name, kept in vars(kind).items()
        if isinstance(kept, MemberDescriptorType) and name != "__dict__" and hasattr(value, name)
    )
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}


@cache
def is_plain(kind: type) -> bool:
    """Tell whether objects of a class hold nothing but a user's attributes."""
    if not is_of_user(kind):
        return kind is SimpleNamespace
    return not issubclass(kind, type | ModuleType | Tensor | nn.Module)


def is_of_user(kind: Any) -> bool:
    """Tell whether a class or function is of no library of `LIBRARIES`."""
    return kind.__module__.partition(".")[0] not in LIBRARIES


def kept_by(modules: Iterable[nn.Module]) -> list[tuple[Any, dict[Any, Any]]]:
    """List the attributes of modules, and the content of containers and plain objects in them."""
    return [
        (holder, content)
        for holder, content in holders([vars(module) for module in modules])
        if not isinstance(holder, tuple)
    ]


def put_back(kept: Iterable[tuple[Any, dict[Any, Any]]]) -> None:
    """Restore the content of modules, containers and plain objects from `kept_by`."""
    for holder, content in kept:
        now = _content(holder) or {}
        if [*now] != [*content] or any(map(operator.is_not, now.values(), content.values())):
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
