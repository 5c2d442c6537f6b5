"""Find the state that layers and a loss can reach beside their values: attributes, variables.

    layer ── attribute, closure, global, hook ──► dict, object, module ◄── another layer, the loss

The walk reads code and does not run it: a party uses the names in all functions that it can call.
It follows modules, functions, containers and objects of the user's classes.
"""

import dis
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from penstock.torch_private import BUFFERS, CHILDREN, PARAMETERS, buffers_of

from .kept import LIBRARIES, UNCOUNTED, fields_of, is_of_user, is_plain
from .layers import Layers

_FILLS = frozenset(
    ("__setitem__", "add", "append", "appendleft", "clear", "extend", "insert", "update")
)
"""Methods that add to a container without reading it."""
_LOCAL = ("LOAD_FAST", "STORE_FAST", "DELETE_FAST", "LOAD_CLOSURE")
"""Beginnings of instructions on local variables, which no other code reaches."""
_OF_OBJECT = ("LOAD_ATTR", "LOAD_METHOD")
"""Instructions that load an attribute of the object loaded before."""


class Uses(NamedTuple):
    """The names of attributes, globals and closure variables, and strings, read and written.

    A container that is only appended to, or whose entries are only set, is not read.
    """

    reads: frozenset[str]
    writes: frozenset[str]


@cache
def uses_of(code: CodeType) -> Uses:
    """Return the names in a function's code, and in the functions defined inside it."""
    reads: set[str] = set()
    writes: set[str] = set()
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for place, step in enumerate(steps):
        if isinstance(step.argval, CodeType):
            inside = uses_of(step.argval)
            reads |= inside.reads
            writes |= inside.writes
        elif not isinstance(step.argval, str) or step.opname.startswith(_LOCAL):
            continue
        elif step.opname.startswith("LOAD_"):
            (writes if _only_fills(steps[place + 1 :]) else reads).add(step.argval)
        elif step.opname.startswith(("STORE_", "DELETE_")):
            writes.add(step.argval)
    return Uses(frozenset(reads), frozenset(writes))


def _only_fills(after: Sequence[dis.Instruction]) -> bool:
    """Tell whether the object loaded before is only filled: `x.append(...)`, `x[key] = ...`."""
    if after and after[0].opname in _OF_OBJECT and after[0].argval in _FILLS:
        return True
    loaded = 0
    for step in after:
        if step.opname == "STORE_SUBSCR":
            return loaded == 1
        if not step.opname.startswith("LOAD_"):
            return False
        loaded += step.opname not in _OF_OBJECT
    return False


_INSTALLED = f"{os.sep}site-packages{os.sep}"
"""Part of the path of an installed package, whose globals count as constants."""
_MOST = 20_000
"""Most objects that the walk of a party visits."""
_NOT_STATE = {BUFFERS, CHILDREN, PARAMETERS, "training", *UNCOUNTED}
"""Attributes of a module that the walk follows otherwise, or that no layer shares."""
_NOT_IN_A_STEP = ("__init__", "__repr__", "__str__", "__getstate__", "__setstate__", "__reduce__")
"""Methods that Python calls implicitly, and never in a step."""
FILLED = (dict, list, set, deque)
"""Containers with entries that can change."""


@dataclass(frozen=True, slots=True)
class Variables:
    """One of a function's variables: a closure variable, or a name among its globals."""

    of: Any
    name: str

    def content(self) -> dict[str, Any]:
        """Return its current value by its name; {} for a global that is gone."""
        if isinstance(self.of, CellType):
            return {self.name: _held(self.of)}
        return {self.name: self.of[self.name]} if self.name in self.of else {}


@dataclass(slots=True)
class Found:
    """A holder that a party reaches, with the first path to it, and its names.

    `names` has None if it lies in another container, so that any code may refer to it.
    """

    holder: Any
    path: str
    names: set[str | None] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Party:
    """A layer, by its number, or the loss: the holders it reaches, the names in its code."""

    label: str
    layer: int
    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    found: dict[Any, Found] = field(default_factory=dict)

    def may_read(self, key: Any, name: str | None) -> bool:
        """Tell whether its code may read `name` of a holder, or the container itself."""
        return self._names(key, name, self.reads)

    def may_use(self, key: Any, name: str | None) -> bool:
        """Tell whether its code may read or write it."""
        return self.may_read(key, name) or self.may_write(key, name)

    def may_write(self, key: Any, name: str | None) -> bool:
        """Tell whether its code may write it."""
        return self._names(key, name, self.writes)

    def _names(self, key: Any, name: str | None, known: set[str]) -> bool:
        names = self.found[key].names if name is None else {name}
        return None in names or not known.isdisjoint(names)


def parties_of(layers: Layers, loss: Any) -> list[Party]:
    """Return the layers of a list, and the loss, with the holders that they reach.

    Of a captured model only the loss matters: capture has checked the blocks.
    """
    inside: dict[int, set[int]] = {}
    for step in layers:
        for module in step.module.modules():
            inside.setdefault(id(module), set()).add(step.index)
    last = len(layers) - 1
    of_loss = [] if loss is None or loss is layers.own_loss else [_Walk(Party("the loss", last))]
    if layers.model is not None and not of_loss:
        return []
    walks = [_Walk(Party(f"layer {s.label}", s.index), s.module) for s in layers]
    for walk in of_loss:
        walk.add(loss, "loss", None)
    return [walk.done(inside) for walk in (*walks, *of_loss)]


class _Walk:
    """Finds the holders that one party reaches, until its code names no more methods."""

    def __init__(self, party: Party, module: nn.Module | None = None) -> None:
        self.party, self._home = party, None if module is None else party.layer
        self._waiting: list[tuple[Any, str]] = []
        self._kinds: dict[type, bool] = {}  # whether forward is called
        self._counted: set[Any] = set()
        self._seen: dict[int, Any] = {}
        if module is not None:
            self.add(module, "", None)

    def add(self, value: Any, path: str, name: str | None) -> None:
        """Queue a value, and record the name by which it was reached."""
        if isinstance(value, FILLED):
            self._note(id(value), value, path).names.add(name)
        if id(value) not in self._seen and len(self._seen) < _MOST and _leads_on(value):
            self._seen[id(value)] = value
            self._waiting.append((value, path))

    def done(self, inside: Mapping[int, set[int]]) -> Party:
        """Finish the walk; `inside` has the layers that contain each module."""
        while self._waiting:
            while self._waiting:
                self._open(*self._waiting.pop(), inside)
            for kind, runs in list(self._kinds.items()):
                self._count_methods(kind, runs=runs)
        return self.party

    def _note(self, key: Any, holder: Any, path: str) -> Found:
        return self.party.found.setdefault(key, Found(holder, path))

    def _open(self, value: Any, path: str, inside: Mapping[int, set[int]]) -> None:
        match value:
            case MethodType():
                self._open_container((value.__func__, value.__self__), path)
            case FunctionType():
                self._count(value, path)
            case partial():
                self._open_container((value.func, *value.args, *value.keywords.values()), path)
            case dict() | list() | set() | deque() | tuple():
                self._open_container(value, path)
            case nn.Module():
                homes = inside.get(id(value))
                self._open_module(value, path, runs=homes is None or self._home in homes)
            case type():
                self._kinds.setdefault(value, False)
                self._note(id(value), value, path)
                self._add_all(_class_state(value), path)
            case _:
                self._kinds.setdefault(type(value), False)
                self._note(id(value), value, path)
                self._add_all(fields_of(value), path)

    def _open_container(self, value: Any, path: str) -> None:
        entries = list(dict.items(value)) if isinstance(value, dict) else enumerate(value)
        for key, part in entries:
            self.add(part, f"{path}[{key!r}]", None)

    def _open_module(self, module: nn.Module, path: str, *, runs: bool) -> None:
        for kind in filter(is_of_user, type(module).__mro__):
            self._kinds[kind] = self._kinds.get(kind, False) or runs
            self.add(kind, kind.__name__, None)
        self._note(id(module), module, path)
        self._add_all({n: v for n, v in vars(module).items() if n not in _NOT_STATE}, path)
        self._add_all(dict(module.named_children()), path)
        for name in UNCOUNTED:
            hooks = vars(module).get(name)
            for hook in hooks.values() if isinstance(hooks, dict) else ():
                self.add(hook, f"{path}{'.' * bool(path)}{name.strip('_')}", None)

    def _add_all(self, named: Mapping[str, Any], path: str) -> None:
        for name, value in named.items():
            self.add(value, f"{path}.{name}" if path else name, name)

    def _count_methods(self, kind: type, *, runs: bool) -> None:
        """Count the methods that code names, and those that Python calls implicitly."""
        for name, method in vars(kind).items():
            is_called = name in self.party.reads or (runs and name == "forward")
            is_called |= name.startswith("__") and name not in _NOT_IN_A_STEP
            behind = getattr(method, "__func__", method)
            parts = (behind.fget, behind.fset) if isinstance(behind, property) else (behind,)
            for part in parts if is_called else ():
                if isinstance(part, FunctionType):
                    self._count(part, kind.__name__)

    def _count(self, function: FunctionType, path: str) -> None:
        """Add the names in a function, and follow its variables."""
        # 1. Count each function once; libraries hold no state of the user's.
        if function in self._counted or not _is_users(function):
            return
        self._counted.add(function)
        reads, writes = uses_of(function.__code__)
        self.party.reads |= reads
        self.party.writes |= writes
        # 2. Follow closure variables, the globals that its code names, and default values.
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            self._note(id(cell), Variables(cell, name), f"closure of {function.__qualname__}")
            self.add(_held(cell), f"{function.__qualname__}: {name}", name)
        known = {} if _INSTALLED in function.__code__.co_filename else function.__globals__
        for name in (reads | writes) & known.keys():
            self._note((id(known), name), Variables(known, name), "global variable")
            self.add(known[name], f"global {name}", name)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.add(value, f"{function.__qualname__} default", None)
        self.add(vars(function).get("__wrapped__"), path, None)


def _leads_on(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return _is_users(value)
    if isinstance(value, type):
        return is_of_user(value)
    if isinstance(value, (MethodType, partial, nn.Module, tuple, *FILLED)):
        return True
    kind: type = type(value)
    return is_plain(kind) and not isinstance(value, ModuleType)


def _is_users(function: FunctionType) -> bool:
    """Tell whether a function is the user's, and not Python's, torch's or Penstock's."""
    return (function.__module__ or "").partition(".")[0] not in LIBRARIES


def _held(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _class_state(kind: type) -> dict[str, Any]:
    functions = (FunctionType, classmethod, staticmethod, property)
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") and not isinstance(value, functions)
    }


def content(holder: Any) -> dict[Any, Any]:
    """Return a holder's content by name or key; a list, set or deque has one entry for all."""
    match holder:
        case Variables():
            return holder.content()
        case dict():
            return dict(dict.items(holder))
        case list() | set() | deque():
            return {None: tuple(holder)}
        case nn.Module():
            own = {n: v for n, v in vars(holder).items() if n not in _NOT_STATE}
            return own | buffers_of(holder)
        case type():
            return _class_state(holder)
        case _:
            return fields_of(holder)


def shared(parties: Iterable[Party]) -> dict[Any, list[Party]]:
    """Return the parties of each holder that several parties reach, by the holder's key."""
    by_key: dict[Any, list[Party]] = {}
    for party in parties:
        for key in party.found:
            by_key.setdefault(key, []).append(party)
    return {key: several for key, several in by_key.items() if len(several) > 1}
