"""Which attributes, variables and keys the code of a function names, and which it only fills."""

import dis
from collections.abc import Sequence
from functools import cache
from types import CodeType
from typing import NamedTuple

_FILLS = frozenset(
    ("__setitem__", "add", "append", "appendleft", "clear", "extend", "insert", "update")
)
"""Methods that put something into a container, and look at nothing in it."""
_LOCAL = ("LOAD_FAST", "STORE_FAST", "DELETE_FAST", "LOAD_CLOSURE")
_OF_OBJECT = ("LOAD_ATTR", "LOAD_METHOD")


class Uses(NamedTuple):
    """Names of attributes, globals and closure variables, and strings, by what becomes of them.

    A container that is only appended to, or whose entries are only set, is not read.
    """

    reads: frozenset[str]
    writes: frozenset[str]


@cache
def uses_of(code: CodeType) -> Uses:
    """Return what a function's code names, with the functions that are made inside it."""
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
    """Tell whether what was loaded before is only filled: `x.append(...)`, or `x[key] = ...`."""
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
