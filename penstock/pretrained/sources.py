"""What gives a tensor of the model its values: a tensor of the folder, or what is made of several.

The names are the model's own, with or without the name of the base model.  Where transformers
renames, fuses or splits tensors of older files as it loads them, its own rules are used.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Read = Callable[[str], Tensor]
"""The name of a tensor in the folder -> the tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Tensors of the folder, and what they are in the model: `make(read)[name in the model]`."""

    names: tuple[str, ...]
    make: Callable[[Read], dict[str, Tensor]]


class Sources:
    """Finds what gives a tensor its values, among the tensors `there` of a folder."""

    def __init__(self, original: nn.Module, there: Iterable[str]) -> None:
        base = getattr(original, "base_model_prefix", "")
        self._prefix = f"{base}." if isinstance(base, str) and base else ""
        self._found = {name: _as_it_is(name, name) for name in there}
        self._found = {**dict(_by_transformers(original, list(self._found))), **self._found}

    def of(self, names: Iterable[str]) -> Iterator[tuple[str, Source]]:
        """Give what there is for a tensor with these names; mostly one, and its name there."""
        candidates = dict.fromkeys(c for name in names for c in self._candidates(name))
        for name in candidates:
            if name in self._found:
                yield name, self._found[name]

    def _candidates(self, name: str) -> Iterator[str]:
        yield name
        if self._prefix:
            short = name.removeprefix(self._prefix)
            yield short if short != name else self._prefix + name


def _as_it_is(name: str, known_as: str) -> Source:
    return Source((name,), lambda read: {known_as: read(name)})


def _by_transformers(original: nn.Module, there: list[str]) -> Iterator[tuple[str, Source]]:
    """Give the names that tensors get as transformers loads them, with what gives their values."""
    library: Any = sys.modules.get("transformers")
    if library is None or not isinstance(original, library.PreTrainedModel):
        return
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:  # one without such rules
        return
    rules: Any = get_model_conversion_mapping(original)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of = {p: converter for converter in converters for p in converter.source_patterns}
    parts: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(there, key=dot_natural_key):
        known_as, pattern = rename_source_key(name, renamings, converters)
        if pattern is not None:
            parts.setdefault(known_as, []).append((pattern, name))
        elif known_as != name:
            yield known_as, _as_it_is(name, known_as)
    for first, of_first in parts.items():
        converter = converter_of[of_first[0][0]]
        source = _converted(original, converter, first, of_first)
        for target in converter.target_patterns:
            yield first.replace(converter.target_patterns[0], target, 1), source


def _converted(
    original: nn.Module, converter: Any, first: str, parts: list[tuple[str, str]]
) -> Source:
    """Give what a rule of transformers makes of several tensors, or makes several of."""

    def make(read: Read) -> dict[str, Tensor]:
        own = copy.deepcopy(converter)
        for pattern, name in parts:
            own.add_tensor(first, name, pattern, read(name))
        made = own.convert(first, model=original, config=getattr(original, "config", None))
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}

    return Source(tuple(name for _, name in parts), make)
