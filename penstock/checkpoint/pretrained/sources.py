"""Where in a folder the values of a tensor are.

The names are the model's own, with or without the name of the base model.  Where transformers
renames, fuses or splits tensors of older files as it loads them, its own rules are used.
"""

from collections.abc import Iterable, Iterator

from torch import nn

from .library import as_loaded
from .source import Source, as_it_is


class Sources:
    """Finds what gives a tensor its values, among the tensors `there` of a folder."""

    def __init__(self, original: nn.Module, there: Iterable[str]) -> None:
        base = getattr(original, "base_model_prefix", "")
        self._prefix = f"{base}." if isinstance(base, str) and base else ""
        self._found = {name: as_it_is(name, name) for name in there}
        self._found = {**dict(as_loaded(original, list(self._found))), **self._found}

    def of(self, names: Iterable[str]) -> Iterator[tuple[str, Source]]:
        """Yield what there is for a tensor with these names; mostly one, and its name there."""
        candidates = dict.fromkeys(c for name in names for c in self._candidates(name))
        for name in candidates:
            if name in self._found:
                yield name, self._found[name]

    def _candidates(self, name: str) -> Iterator[str]:
        yield name
        if self._prefix:
            short = name.removeprefix(self._prefix)
            yield short if short != name else self._prefix + name
