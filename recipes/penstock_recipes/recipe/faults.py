"""Describe a fault of a recipe in one line: the key, the value and the remedy."""

import json
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from .recipe import Recipe
from .section import Section, variants

_CLOSE = 0.75
"""Least similarity (difflib's ratio) of a suggested key of any section."""


def describe(fault: ErrorDetails) -> str:
    """Describe a fault: the key, its value, the expected value, and the nearest key."""
    place = [str(part) for part in fault["loc"]]
    kind = ""
    if len(place) > 1 and place[1] in _KINDS.get(place[0], ()):
        kind = place.pop(1)  # the section's name, which pydantic inserts
    where = ".".join(place)
    match fault["type"]:
        case "extra_forbidden":
            return _unknown(place, where, kind)
        case "missing" if len(place) == 1:
            return f"the section [{where}] is missing"
        case "missing" | "union_tag_not_found":
            return f"the key {where if fault['type'] == 'missing' else where + '.name'} is missing"
        case "union_tag_invalid":
            name, kinds = fault["input"]["name"], _KINDS[where]
            return f"{where}.name = {_shown(name)} must be {_or(kinds)}{_nearest(name, kinds)}"
        case "model_type" | "model_attributes_type":
            shown = _shown(fault["input"])
            return f"{where} = {shown} must be a section: [{where}] and keys below it"
        case _:
            return _mistyped(where, fault)


def suggest_place(key: str) -> str:
    """Return "section.key" of the recipe key nearest to `key`; empty if none is very near."""
    sections = reversed(Recipe.model_fields.items())
    places = {
        k: section
        for section, field in sections
        for kind in variants(field)
        for k in kind.model_fields
    }
    near = get_close_matches(key, places, n=1, cutoff=_CLOSE)
    return f"{places[near[0]]}.{near[0]}" if near else ""


def _unknown(place: list[str], where: str, kind: str) -> str:
    key = place[-1]
    if len(place) == 1:
        names = list(Recipe.model_fields)
        hint = suggest_place(key)
        near_key = f"; did you mean the key {hint}?" if hint else ""
        near = _nearest(key, names) or near_key
        return f"unknown section [{where}]{near}; known: {', '.join(names)}"
    # The key may belong to another variant of the section.
    section = place[0]
    keys_by_kind = {
        _name_of(variant): list(variant.model_fields)
        for variant in variants(Recipe.model_fields[section])
    }
    for other, keys in keys_by_kind.items():
        if kind and key in keys:
            setting = f'{section}.name = "{kind}"'
            return f'unknown key {where} with {setting}; it belongs to name = "{other}"'
    # Or it may be misspelt, or belong to another section.
    known = keys_by_kind[kind] if kind else next(iter(keys_by_kind.values()))
    close = get_close_matches(key, known, n=1)
    hint = f"{section}.{close[0]}" if close else suggest_place(key)
    return f"unknown key {where}" + (
        f"; did you mean {hint}?" if hint else f"; known: {', '.join(known)}"
    )


def _mistyped(where: str, fault: ErrorDetails) -> str:
    message = fault["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    if isinstance(fault["input"], BaseModel) or not where or "." not in where:
        return message  # a rule between keys, which names them
    expected = fault.get("ctx", {}).get("expected", "")
    if fault["type"] == "literal_error" and isinstance(fault["input"], str):
        words = expected.split("'")[1::2]
        message = f"must be {_or(words)}{_nearest(fault['input'], words)}"
    elif fault["type"] == "value_error" and isinstance(fault["input"], str):
        message += _nearest(fault["input"], message.split('"')[1::2])
    elif fault["type"] == "string_type":
        message += f'; write it in quotes: {where}="{fault["input"]}"'
    return f"{where} = {_shown(fault['input'])} {message}"


def _nearest(word: object, known: list[str]) -> str:
    near = get_close_matches(str(word), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _or(words: list[str]) -> str:
    return " or ".join(f'"{word}"' for word in words)


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)


def _name_of(variant: type[Section]) -> str:
    """Return the only value of the key `name`; empty if there is no such key."""
    if "name" not in variant.model_fields:
        return ""
    return str(get_args(variant.model_fields["name"].annotation)[0])


_KINDS = {
    section: [_name_of(variant) for variant in variants(field)]
    for section, field in Recipe.model_fields.items()
    if len(variants(field)) > 1
}
"""The names of each section whose keys depend on its name."""
