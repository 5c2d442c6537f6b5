"""The public names of the package with their signatures, as `tests/public_names.txt` keeps them.

`python -m tests.public_names` writes the file anew.
"""

import enum
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import penstock

FILE = Path(__file__).with_suffix(".txt")


def public_names() -> list[str]:
    """Return a line for each public name, and for each public member of a public class."""
    lines = [f"penstock.{name}{_signature(getattr(penstock, name))}" for name in penstock.__all__]
    classes = [getattr(penstock, name) for name in penstock.__all__]
    for kind in filter(inspect.isclass, classes):
        lines += [f"penstock.{kind.__name__}.{line}" for line in _members(kind)]
    lines += [f"penstock.schedules.{name}" for name in penstock.schedules.__all__]
    return sorted(lines)


def _members(kind: type) -> Iterator[str]:
    ours = [base for base in kind.__mro__ if base.__module__.startswith("penstock")]
    members = {name: value for base in reversed(ours) for name, value in vars(base).items()}
    members |= getattr(kind, "__members__", {})
    for name, value in members.items():
        if name.startswith("_"):
            continue
        if isinstance(value, enum.Enum):
            yield f"{name} = {value.value!r}"
        else:
            yield f"{name}{_signature(getattr(value, '__func__', value))}"


def _signature(value: Any) -> str:
    """Return names, kinds and defaults of parameters; types may become wider at any time."""
    if not callable(value):
        return ""
    if inspect.isclass(value) and issubclass(value, enum.Enum | Exception):
        return ""
    found = inspect.signature(value)
    bare = [p.replace(annotation=p.empty, default=_plain(p)) for p in found.parameters.values()]
    return str(found.replace(parameters=bare, return_annotation=found.empty))


def _plain(parameter: inspect.Parameter) -> Any:
    plain = (str, int, float, bool, tuple, enum.Enum, type(None), type(parameter.empty))
    return parameter.default if isinstance(parameter.default, plain) else ...


if __name__ == "__main__":
    FILE.write_text("\n".join(public_names()) + "\n")
