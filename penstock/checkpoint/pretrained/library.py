"""The names under which transformers saves and loads tensors, older files' included."""

import copy
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from .folder import Read, Source, as_it_is


def is_of_transformers(original: nn.Module) -> bool:
    """Tell whether a model is one of transformers, which is not imported for it."""
    library: Any = sys.modules.get("transformers")
    return library is not None and isinstance(original, library.PreTrainedModel)


def patterns_of(original: nn.Module, *attributes: str) -> list[str]:
    """Return the name patterns in these attributes of a model's class."""
    return [pattern for name in attributes for pattern in getattr(original, name, None) or ()]


def fits(name: str, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def as_saved(original: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as transformers writes them to files: by older names, or in parts."""
    if not is_of_transformers(original):
        return tensors
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # one that writes them as they are
        return tensors
    saved: dict[str, Tensor] = revert_weight_conversion(original, tensors)  # type: ignore[arg-type]
    return saved


def as_loaded(original: nn.Module, there: list[str]) -> Iterator[tuple[str, Source]]:
    """Yield the names under which transformers loads tensors, each with its source."""
    if not is_of_transformers(original):
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
    # Split the rules: renamings map one tensor to one, converters several to several.
    model: Any = original
    rules: Any = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of = {p: converter for converter in converters for p in converter.source_patterns}
    parts: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(there, key=dot_natural_key):
        known_as, pattern = rename_source_key(name, renamings, converters)
        if pattern is not None:
            parts.setdefault(known_as, []).append((pattern, name))
        elif known_as != name:
            yield known_as, as_it_is(name, known_as)
    # Each converter makes all its targets at once: they share one source.
    for first, of_first in parts.items():
        converter = converter_of[of_first[0][0]]
        source = _converted(original, converter, first, of_first)
        for target in converter.target_patterns:
            yield first.replace(converter.target_patterns[0], target, 1), source


def _converted(
    original: nn.Module, converter: Any, first: str, parts: list[tuple[str, str]]
) -> Source:
    """Return the source of the tensors that a converter of transformers makes of `parts`."""

    def make(read: Read) -> dict[str, Tensor]:
        fresh = copy.deepcopy(converter)
        for pattern, name in parts:
            fresh.add_tensor(first, name, pattern, read(name))
        made = fresh.convert(first, model=original, config=getattr(original, "config", None))
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}

    return Source(tuple(name for _, name in parts), make)
