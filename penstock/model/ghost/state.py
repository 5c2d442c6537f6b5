"""What a model's own forward changes outside its blocks, and so on every stage."""

import copy
import operator
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from penstock.errors import CutError

from .ghost import Ghost
from .graphs import Exported

Outer = dict[tuple[str, str], tuple[Any, int, tuple[Any, ...]]]
"""(name of a module, name of an attribute) -> its value, its version if it is a tensor, and what
it holds if it is a list or a dict."""
UNCOUNTED = frozenset(name for name in vars(nn.Module()) if name.endswith("hooks"))
_DICTIONARIES = frozenset(
    name for name, value in vars(nn.Module()).items() if isinstance(value, dict)
)


def outer_state(model: nn.Module, blocks: Collection[nn.Module]) -> Outer:
    """Note all attributes of the modules that are not inside blocks."""
    inside = {id(part) for block in blocks for part in block.modules()}
    found: Outer = {}
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        for name, value in _attributes(module):
            found[path, name] = value, _version(value), tuple(_contents(value))
    return found


def _contents(value: Any) -> Iterator[Any]:
    """Yield the entries of a list, set or dict, and of those in it."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | deque):
        yield type(value)
        for entry in value:
            yield entry
            yield from _contents(entry)


def _version(value: Any) -> int:
    is_plain = isinstance(value, Tensor) and type(value) is not Ghost
    return value._version if is_plain else 0


def _is_same(old: tuple[Any, ...], new: tuple[Any, ...]) -> bool:
    alike = len(old[2]) == len(new[2]) and all(map(operator.is_, old[2], new[2]))
    return old[0] is new[0] and old[1] == new[1] and alike


def put_back(before: dict[nn.Module, dict[str, Any]]) -> None:
    """Give modules the attributes that they had; see `vars_of`."""
    for module, names in before.items():
        for name in set(vars(module)) - set(names):
            del module.__dict__[name]
        for name, value in names.items():
            if name in _DICTIONARIES:
                module.__dict__[name].clear()
                module.__dict__[name].update(value)
                continue
            module.__dict__[name], content = value
            if isinstance(content, list):
                value[0][:] = content
            elif isinstance(content, dict | set):
                value[0].clear()
                value[0].update(content)


def vars_of(model: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Note the attributes of all modules."""
    modules = [*model.modules()]
    if isinstance(model, Exported):  # its mode is that of what was exported
        modules += model.original.modules()
    return {
        module: {
            name: dict(value) if name in _DICTIONARIES else (value, _copy(value))
            for name, value in vars(module).items()
        }
        for module in modules
    }


def _copy(value: Any) -> Any:
    return copy.copy(value) if type(value) in (list, dict, set) else None


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if name in ("_buffers", "_parameters"):
            yield from ((key, tensor) for key, tensor in value.items() if tensor is not None)
        elif name not in UNCOUNTED:
            yield name, value


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


def changed_outside(module: str, name: str) -> CutError:
    """Make the error for code between blocks that changes what a module keeps."""
    where = f"the forward of '{module}'" if module else "the forward of the model itself"
    return CutError(
        f"{where} changes its '{name}', and it is no block: every stage would do so, for each "
        "micro-batch, in its own time. Keep it in a local variable, or put it into an nn.Module "
        "with parameters"
    )
