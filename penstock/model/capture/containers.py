"""Lists, deques and dicts that a block fills: all stages get their new content.

block's stage     copies of its arguments -> block -> result, and content of each changed copy
                                                                |
every stage       the caller's own containers <- put_back <-----+

Each run of the block gets new copies, so that a checkpoint repeats it on its original arguments.
"""

import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import Any

from torch import Tensor

from penstock.errors import CutError
from penstock.model.compare import is_same_plain
from penstock.model.open_containers import opened
from penstock.model.pytree import Structure, unflatten

from .errors import calling_line, changes_container
from .events import EventKey
from .ghost import PLAIN

_TOLD = (list, deque, dict, UserDict)


class Given(int):
    """The number in `parts` of an argument of the block, or of a part of one.

    On other stages the arguments have the same numbers.
    """


class Filled(tuple[Any, ...]):
    """A block's result, the numbers of the containers that it changed, and their new content."""


def parts(value: Any) -> list[Any]:
    """List a value and all its parts, depth first; a part met twice is listed twice."""
    listed = [value]
    if type(value) not in PLAIN and not isinstance(value, Tensor):
        children = opened(value)
        for child in children[0] if children else ():
            listed += parts(child)
    return listed


def can_change(value: Any) -> bool:
    """Tell whether a value is a mutable container, or holds one."""
    if type(value) in PLAIN or isinstance(value, Tensor):
        return False
    return any(_entries(part) is not None for part in parts(value))


def entries_of(given: list[Any]) -> list[list[Any] | None]:
    """Return the content of each mutable container among the parts; None for other parts."""
    return [_entries(part) for part in given]


def changed(given: list[Any], before: list[list[Any] | None]) -> list[int]:
    """Return the numbers of the containers whose content has changed."""
    return [n for n, part in enumerate(given) if not _is_same(_entries(part), before[n])]


def on_copies(
    key: EventKey, function: Callable[..., Any], structure: Structure
) -> Callable[..., Any]:
    """Return a function of the tensors in a block's arguments, which calls it on new containers.

    The function returns the block's result, or a `Filled` if the block changes or returns these
    containers.
    """

    def run(*tensors: Tensor) -> Any:
        args, kwargs = unflatten(structure, list(tensors))
        given = parts((args, kwargs))
        before, attributes = entries_of(given), [*map(_attributes, given)]
        result = function(*args, **kwargs)
        for part, was in zip(given, attributes, strict=True):
            if not _is_same(_attributes(part), was):
                raise changes_container(part, key)
        return _told(key, given, before, result)

    return run


def _told(key: EventKey, given: list[Any], before: list[list[Any] | None], result: Any) -> Any:
    numbers = tuple(changed(given, before))
    for number in numbers:
        if not _can_be_told(given[number]):
            raise changes_container(given[number], key)
    number_of = {id(part): Given(n) for n, part in reversed([*enumerate(given)])}
    containers = {id(p) for p, was in zip(given, before, strict=True) if was is not None}
    new: list[Any] = []

    def noted(value: Any) -> Any:
        if _entries(value) is not None:
            new.append(value)
        return value

    def known(value: Any) -> Any:
        is_known = type(value) not in PLAIN and id(value) in number_of
        return noted(number_of[id(value)] if is_known else value)

    told = _replaced(result, lambda v: number_of[id(v)] if id(v) in containers else noted(v))
    if told is result and not numbers:
        return result
    copies = (dict(c) if isinstance(c, Mapping) else [*c] for c in map(given.__getitem__, numbers))
    contents = [_replaced(copy, known) for copy in copies]
    _check_told_once(new, key)
    return Filled((told, numbers, contents))


def _check_told_once(new: list[Any], key: EventKey) -> None:
    """Refuse a new container that a block returns in two places: other stages would get two."""
    seen: set[int] = set()
    for container in new:
        if id(container) in seen:
            raise CutError(
                f"{key} makes a {type(container).__name__} and gives it in two places "
                f"({calling_line()}), as in a list that it was given and in what it returns; on "
                "other stages there would be two. Give it in one place only, or a copy of it"
            )
        seen.add(id(container))


def _can_be_told(container: Any) -> bool:
    return isinstance(container, _TOLD) and not dataclasses.is_dataclass(container)


def put_back(told: Any, key: EventKey, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a block's changes to the caller's own containers; return its result.

    A CutError refuses a changed list that was given twice.
    """
    if type(told) is not Filled:
        return told
    given = parts((args, kwargs))
    here = partial(_replaced, instead=lambda v: given[v] if type(v) is Given else v)
    result, numbers, contents = told
    for number, content in zip(numbers, here(contents), strict=True):
        container = given[number]
        if sum(part is container for part in given) > 1:
            raise changes_container(container, key)
        container.clear()
        if isinstance(container, dict | UserDict):
            container.update(content)
        else:
            container.extend(content)
        if not _is_same(_entries(container), _entries(content)):  # its class changed them
            raise changes_container(container, key)
    return here(result)


def filled(told: Any, call: tuple[Any, ...]) -> list[Any]:
    """List the caller's own containers that a block has changed."""
    if type(told) is not Filled:
        return []
    given = parts(call)
    return [given[number] for number in told[1]]


def _entries(part: Any) -> list[Any] | None:
    """List the content of a mutable container; None for anything else."""
    if isinstance(part, Mapping):
        return [*part, *part.values()]
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return [getattr(part, field.name, None) for field in dataclasses.fields(part)]
    return [*part] if isinstance(part, list | deque | Set) else None


def _attributes(part: Any) -> list[Any] | None:
    """List the attributes of a container of the user's own class; None for anything else."""
    if not _can_be_told(part):
        return None
    own = getattr(part, "__dict__", {})
    return [*own, *own.values()]


def _is_same(now: list[Any] | None, before: list[Any] | None) -> bool:
    if now is None or before is None:
        return now is before
    pairs = zip(now, before, strict=False)
    return len(now) == len(before) and all(a is b or is_same_plain(a, b) for a, b in pairs)


def _replaced(value: Any, instead: Callable[[Any], Any]) -> Any:
    """Replace parts of a value by `instead(part)`; return the value itself if none changes."""
    new = instead(value)
    if new is not value or type(value) in PLAIN or isinstance(value, Tensor):
        return new
    children, rebuild = opened(value) or ([], None)
    twins = [_replaced(child, instead) for child in children]
    if rebuild is None or all(twin is child for twin, child in zip(twins, children, strict=True)):
        return value
    return rebuild(twins)
