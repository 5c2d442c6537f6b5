"""Structures as picklable templates, and stand-ins for objects on other stages."""

from typing import Any, NoReturn

from .open_containers import DictOf
from .pytree import Constant, Leaf, Node, Sealed, Structure, flatten, unflatten


def template(structure: Structure) -> Any:
    """Return a value with `Leaf`s in place of its tensors; it is picklable if its classes are."""

    def num_leaves(part: Structure) -> int:
        match part:
            case Leaf(index):
                return index + 1
            case Node(_, children):
                return max(map(num_leaves, children), default=0)
            case Constant():
                return 0

    return unflatten(structure, [Leaf(index) for index in range(num_leaves(structure))])


def from_template(value: Any) -> Structure:
    """Return the structure of a template."""
    return flatten(value)[1]


def is_plain(structure: Structure) -> bool:
    """Tell whether equal structures are interchangeable.

    They are if they hold only tensors, None and sealed objects in tuples, lists and dicts with
    keys that are strings or tuples.
    """
    match structure:
        case Leaf():
            return True
        case Node(DictOf(keys), children):
            return all(isinstance(key, str | tuple) for key in keys) and all(
                map(is_plain, children)
            )
        case Node(rebuild, children):
            return rebuild in (tuple, list) and all(map(is_plain, children))
        case Constant(value):
            return value is None or isinstance(value, Sealed)


class StandIn(Sealed):
    """The stand-in for an object on another stage; any use of it raises its `_error`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies and pickles look these up
            raise AttributeError(name)
        raise self._error()

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise the error."""
        raise self._error()

    __call__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __float__ = refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = refuse

    def _error(self) -> Exception:
        raise NotImplementedError
