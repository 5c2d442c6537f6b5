"""Write frozen values as JSON, and read them from JSON or TOML.

What does not fit is an error of one line that names the place: `hosts[0].count must be a whole
number, and is "two"`.  Fields may be numbers, strings, tuples, mappings from strings, enums,
schedule families and other dataclasses; a field that does not count for equality is left out.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from penstock.errors import ConfigError, UnreadableError, shown
from penstock.schedules.family import Family
from penstock.schedules.names import NAMES_IN_FILES, argument_types, family_named

_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    NoneType: "null",
}
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class _Named:
    """A schedule family as it stands in a file."""

    name: str
    arguments: dict[str, Any]


def to_json(value: Any) -> str:
    """Write a dataclass as JSON, one field a line.

    Raises:
        UnreadableError: it has a schedule that is a function of the user's own.
    """
    lines = [f"  {json.dumps(name)}: {_text(part)}" for name, part in _plain(value).items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _text(value: Any) -> str:
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return "[\n    " + ",\n    ".join(map(_text, value)) + "\n  ]"
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    match value:
        case Enum():
            return value.value
        case Family():
            arguments = dict(value.arguments)
            if value.name not in NAMES_IN_FILES or value != family_named(value.name, arguments):
                raise UnreadableError(
                    f"the schedule {value.name} is a function of your own, and a file can only "
                    f"name one of {', '.join(NAMES_IN_FILES)}"
                )
            return {"name": value.name, "arguments": arguments}
        case Fraction():
            return str(value)
    return {field.name: getattr(value, field.name) for field in _saved(value)}


def _saved(kind: Any) -> list[Field[Any]]:
    """Return the fields of a dataclass that files hold: those by which values are equal."""
    return [field for field in fields(kind) if field.compare]


def path_of(given: object, kind: str, error: type[ConfigError] = UnreadableError) -> Path:
    """Return the path of a file that holds a `kind`: a str or a path is one, and nothing else.

    Raises:
        ConfigError: it is something else, or the text of such a file; of the class `error`.
    """
    if not isinstance(given, str | os.PathLike):
        raise error(f"path={shown(given)}; give the path of a file, as a str or pathlib.Path")
    if str(given).lstrip().startswith("{"):
        raise error(
            f"path={shown(given)} is no path but the text of a file; read that by "
            f"{kind}.from_json(text)"
        )
    return Path(given)


def from_json(kind: type, text: str) -> Any:
    """Read a value of the dataclass `kind`.

    Raises:
        UnreadableError: the text is cut off or no JSON, or a value is missing, unknown or of
            another type.
        ConfigError: values do not fit together.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"it is damaged, or no JSON: {error}") from None
    return from_plain(kind, data)


def from_plain(kind: Any, data: Any, where: str = "") -> Any:
    """Read a value of a type from plain data, such as a TOML file holds; `where` is its place.

    Raises:
        UnreadableError: a value is missing, unknown or of another type.
        ConfigError: values do not fit together.
    """
    return _read(kind, data, where)


def _read(kind: Any, data: Any, where: str) -> Any:
    of, parts = get_origin(kind), get_args(kind)
    if of is tuple:
        return _tuple(parts, data, where)
    if of in (dict, Mapping):
        every = _object(data, where).items()
        return {name: _read(parts[1], x, _place(where, name)) for name, x in every}
    if isinstance(kind, UnionType):
        return _read(_member(parts, data), data, where)
    if kind is Family:
        return _family(data, where)
    if is_dataclass(kind):
        return _dataclass(kind, _object(data, where), where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        known = {each.value: each for each in kind}
        if not isinstance(data, str) or data not in known:
            raise _unfit(where, " or ".join(map(json.dumps, known)), data)
        return known[data]
    return _plain_value(kind, data, where)


def _family(data: Any, where: str) -> Family:
    named = _read(_Named, data, where)
    types = argument_types(named.name)
    arguments = {
        name: _read(types.get(name, Any), data, _place(where, f"arguments.{name}"))
        for name, data in named.arguments.items()
    }
    return family_named(named.name, arguments)


def _tuple(parts: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    items = list(_list(data, where))
    kinds = parts[:1] * len(items) if parts[-1] is ... else parts
    if len(kinds) != len(items):
        raise _unfit(where, f"a list of {len(kinds)}", data)
    return tuple(
        _read(kind, x, f"{where}[{n}]") for kind, (n, x) in zip(kinds, items, strict=True)
    )


def _member(parts: tuple[Any, ...], data: Any) -> Any:
    """Return the one of a union's parts that reads `data`; the first if none does."""
    if Fraction in parts and isinstance(data, int | str):
        return Fraction
    if data is None and NoneType in parts:
        return NoneType
    if isinstance(data, str) and str in parts:
        return str
    if isinstance(data, dict):
        return next((part for part in parts if is_dataclass(part)), parts[0])
    if isinstance(data, list):
        return next((part for part in parts if get_origin(part) is tuple), parts[0])
    return parts[0]


def _plain_value(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return data
    if kind is Fraction:
        return _exact(data, where)
    if kind is float and type(data) is int and abs(data) < 2**53:
        data = float(data)
    if type(data) is not kind or (kind is float and not math.isfinite(data)):
        raise _unfit(where, _WORDS[kind], data)
    return data


def _exact(data: Any, where: str) -> int | Fraction:
    if type(data) is int:
        return data
    try:
        return Fraction(data if isinstance(data, str) else "no number")
    except (ValueError, ZeroDivisionError):
        raise _unfit(where, 'a finite number, or a fraction as "1/3"', data) from None


def _list(data: Any, where: str) -> Any:
    if not isinstance(data, list):
        raise _unfit(where, "a list", data)
    return enumerate(data)


def _object(data: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise _unfit(where, "an object", data)
    return data


def _dataclass(kind: Any, data: dict[str, Any], where: str) -> Any:
    hints, known = get_type_hints(kind), _saved(kind)
    names = [field.name for field in known]
    data = {name: x for name, x in data.items() if name not in getattr(kind, "GONE_FIELDS", ())}
    for name in data:
        if name not in names:
            place = _place(where, name)
            raise UnreadableError(f"it has an unknown key {place}; known are {', '.join(names)}")
    for field in known:
        is_needed = field.default is MISSING and field.default_factory is MISSING
        if field.name not in data and is_needed:
            raise UnreadableError(f"it lacks {_place(where, field.name)}")
    return kind(**{name: _read(hints[name], x, _place(where, name)) for name, x in data.items()})


def _place(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _unfit(where: str, wanted: str, data: Any) -> UnreadableError:
    shown = json.dumps(data, default=str)  # TOML has dates
    short = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return UnreadableError(f"{where or 'it'} must be {wanted}, and is {short}")
