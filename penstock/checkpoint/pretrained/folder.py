"""Read a folder in the layout of Hugging Face's libraries: the file and the name of each tensor.

model.safetensors                all tensors, or
model.safetensors.index.json     {"metadata": ..., "weight_map": {name: file}}, and
model-00001-of-00002.safetensors  ... the files that it names
extra_state.json                 {name: value}: extra state of modules that is no tensor, of ours

transformers saves and loads some tensors under other names, older files' included.
"""

import copy
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from penstock.checkpoint.files import check_inside
from penstock.errors import CheckpointError
from penstock.sharding.layouts import Slice

Read = Callable[[str], Tensor]
"""The name of a tensor in the folder -> the tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Tensors `names` of the folder; `make(read)` returns the model's tensors made of them.

    With `plain`, a slice of the tensor in the folder is the same slice in the model.
    """

    names: tuple[str, ...]
    make: Callable[[Read], dict[str, Tensor]]
    plain: bool = False


def as_it_is(name: str, known_as: str) -> Source:
    """Return a tensor under another name."""
    return Source((name,), lambda read: {known_as: read(name)}, plain=True)


MODEL = "model.safetensors"
INDEX = f"{MODEL}.index.json"
EXTRA = "extra_state.json"
_OF_HUB = (
    ". To load a model of the Hugging Face hub, download it first: "
    "huggingface_hub.snapshot_download(...) returns its folder"
)
"""The end of a message about a path that may be meant as a model's name there."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "BOOL": torch.bool,
}
"""Dtypes by safetensors' names; its other types are packed or scaled, and read as bytes."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder; `files` has the file of each tensor, `values` the state that is no tensor."""

    path: Path
    files: Mapping[str, Path]
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path) -> "Folder":
        """Read the names of the tensors in a folder; files that an index names stay closed."""
        if not path.is_dir():
            fault = "is a file" if path.exists() else "does not exist"
            hub = "" if path.exists() or len(path.parts) != 2 or path.is_absolute() else _OF_HUB
            raise CheckpointError(f"{path} {fault}; give the folder of a model{hub}")
        values = _values(path)
        if (path / INDEX).is_file():
            files = {name: path / file for name, file in _weight_map(path).items()}
            return cls(path, files, values)
        if not (path / MODEL).is_file():
            raise CheckpointError(_without_safetensors(path))
        with _opened(path / MODEL) as file:
            return cls(path, dict.fromkeys(file.keys(), path / MODEL), values)

    @property
    def names(self) -> list[str]:
        """The names of tensors and values."""
        return [*self.files, *self.values]

    @contextmanager
    def reading(self, names: Iterable[str]) -> Iterator[tuple[Read, Callable[..., Any]]]:
        """Open the files that hold `names`; give functions to see a tensor's kind, as a tensor on
        the meta device, and to read it, or its `piece`, or a value.
        """
        # 1. Open the files, and check that they hold the names.
        wanted = [name for name in names if name in self.files]
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for file in dict.fromkeys(self.files[name] for name in wanted):
                opened[file] = stack.enter_context(_opened(file))
            there = {file: set(content.keys()) for file, content in opened.items()}
            for name in wanted:
                if name not in there[self.files[name]]:
                    raise CheckpointError(
                        f"{self.files[name]} does not hold {name}, as {INDEX} says; copy the "
                        "folder anew"
                    )

            # 2. Hand out two readers: of kinds, which read headers only, and of values.
            def look(name: str) -> Tensor:
                part = opened[self.files[name]].get_slice(name)
                dtype = _DTYPES.get(part.get_dtype(), torch.uint8)
                return torch.empty(part.get_shape(), dtype=dtype, device="meta")

            def read(name: str, piece: Slice | None = None) -> Any:
                if name not in self.files:
                    return self.values[name]
                file = opened[self.files[name]]
                if piece is None:
                    return file.get_tensor(name)
                return file.get_slice(name)[piece.indices]

            yield look, read


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    if not file.is_file():
        raise CheckpointError(
            f"{file} is not there, and {INDEX} names it; copy the folder anew, with all files"
        )
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} is damaged: {error}; copy it anew") from error


def _values(path: Path) -> dict[str, Any]:
    file = path / EXTRA
    try:
        values = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return dict(values.items())
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}; copy it anew") from None


def _weight_map(path: Path) -> dict[str, str]:
    """Read an index; its files are in the folder, though links there may lead out of it."""
    try:
        weight_map = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path / INDEX} is no index of tensors ({type(error).__name__}: {error}); copy it "
            "anew"
        ) from None
    for file in dict.fromkeys(files.values()):
        check_inside(path, file, INDEX, follows_links=True)
    return files


def _without_safetensors(path: Path) -> str:
    pickled = sorted(file.name for file in path.glob("*.bin"))
    if pickled:
        return (
            f"{path} holds {', '.join(pickled[:3])} and no {MODEL}. Penstock never unpickles a "
            "file, since that runs whatever code is in it. If you trust it, convert it once: "
            f"AutoModel.from_pretrained({str(path)!r}).save_pretrained(new_folder), with your "
            "model's class for AutoModel"
        )
    there = ", ".join(sorted(file.name for file in path.iterdir())[:5]) or "nothing"
    return f"{path} holds neither {MODEL} nor {INDEX}, but {there}; give the folder of a model"


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
