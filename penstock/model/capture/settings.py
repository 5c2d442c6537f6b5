"""Settings: plain values that a model's first forward puts where None or nothing was, and flags.

transformers models do so with `config.problem_type`, which they read off their first labels.
Every stage sets the same, as long as later forwards leave it alone.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from .outer_state import fields, is_plain, kept_by

_VALUES = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)
_ABSENT = object()
_IS_IMMUTABLE = 1 << 8
"""Flag of a class written in C: whether its objects are set again cannot be seen."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An attribute of a module or plain object; `before` is `_ABSENT` where it had none."""

    holder: Any
    name: str
    before: Any
    value: Any


def settable(modules: Iterable[nn.Module]) -> list[tuple[Any, Any]]:
    """Note the attributes of modules, and of the plain objects that these keep."""
    modules = [*modules]
    kept = [(holder, content) for holder, content in kept_by(modules) if _is_seen(type(holder))]
    return [*kept, *((module, dict(vars(module))) for module in modules)]


def _is_seen(kind: type) -> bool:
    return is_plain(kind) and not kind.__flags__ & _IS_IMMUTABLE


def new_settings(kept: Iterable[tuple[Any, Any]]) -> list[Setting]:
    """List what is set now, and was not when it was `kept`."""
    return [
        Setting(holder, name, before.get(name, _ABSENT), value)
        for holder, before in kept
        for name, value in fields(holder).items()
        if _is_setting(before.get(name), value)
    ]


def _is_setting(before: Any, value: Any) -> bool:
    if before is None:
        return isinstance(value, _VALUES)
    return isinstance(before, bool) and isinstance(value, bool) and value != before


@contextmanager
def taken_back(settings: Iterable[Setting]) -> Iterator[None]:
    """Let modules and plain objects be as before their settings inside."""
    for setting in settings:
        if setting.before is _ABSENT:
            object.__delattr__(setting.holder, setting.name)
        else:
            object.__setattr__(setting.holder, setting.name, setting.before)
    yield
    for setting in settings:
        object.__setattr__(setting.holder, setting.name, setting.value)


@contextmanager
def set_again(settings: Iterable[Setting]) -> Iterator[set[str]]:
    """Note the names of settings of plain objects that are set once more inside."""
    found: set[str] = set()
    places = {(id(setting.holder), setting.name) for setting in settings}
    with ExitStack() as after:
        for kind in {type(s.holder) for s in settings if not isinstance(s.holder, nn.Module)}:
            own = vars(kind).get("__setattr__")
            setattr(kind, "__setattr__", _noting(kind.__setattr__, places, found))  # noqa: B010
            after.callback(_give_back, kind, own)
        yield found


def _noting(native: Any, places: Collection[tuple[int, str]], found: set[str]) -> Any:
    def write(holder: Any, name: str, value: Any) -> None:
        if (id(holder), name) in places:
            found.add(name)
        native(holder, name, value)

    return write


def _give_back(kind: type, own: Any) -> None:
    if own is None:
        del kind.__setattr__
    else:
        setattr(kind, "__setattr__", own)  # noqa: B010
