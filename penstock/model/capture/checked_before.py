"""What was compared once is not compared again: each model found equal has a mark on disk.

A mark holds for one model: its structure, modes and recording, its source files and those around
them, ours, and the version of torch.
"""

import sys
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.errors import CheckError
from penstock.remembered import cache_file, keep
from penstock.torch_private import has_accumulation_hooks

from .captured import Captured
from .check import prove
from .source import captured_layers
from .watch import original_class

_MOST_STAGES = 8
_KNOWN = ("builtins", "torch")


def prove_once(captured: Captured, example_inputs: Any) -> str:
    """Compare a cut model with the whole one, if that was not done before.

    Returns:
        What was found, in a sentence.

    Raises:
        CheckError: they differ; says where the recording was saved.
    """
    reason = _why_not(captured)
    if reason is not None:
        return f"not checked: {reason}"
    mark = _mark(captured)
    if mark is not None and mark.is_file():
        return mark.read_text(encoding="utf-8")
    try:
        found = prove(captured, example_inputs, _partition(captured))
    except CheckError as error:
        error.add_note(f"the recording is saved for a report: {_save(captured)}")
        raise
    if mark is not None and found.startswith("checked"):
        keep(mark, found.encode())
    return found


def _why_not(captured: Captured) -> str | None:
    parameters = list(captured.model.parameters())
    if any(tensor.is_meta for tensor in (*parameters, *captured.model.buffers())):
        return "the model has no values yet"
    if len(captured.calls) < 2:
        return "there is one block, and so no cut"
    if any(has_accumulation_hooks(p) for p in parameters):
        return "hooks on its gradients would run"
    if dist.is_available() and dist.is_initialized() and dist.get_rank():
        return "rank 0 does"
    return None


def _partition(captured: Captured) -> tuple[int, ...]:
    """Cut into a few stages, of about as many calls each."""
    spans = captured_layers(captured).spans
    num_stages = min(_MOST_STAGES, len(spans))
    starts = [spans[stage * len(spans) // num_stages][0] for stage in range(num_stages)]
    ends = [*starts[1:], len(captured.calls)]
    return tuple(end - start for start, end in zip(starts, ends, strict=True))


def _mark(captured: Captured) -> Path | None:
    """Name the file that marks this model; None where its source cannot be known, or
    nothing is kept.
    """
    digest = sha256()
    try:
        for fact in (*_facts(captured), *map(_state_of, _sources(captured.model))):
            digest.update(f"{fact}\n".encode())
    except OSError:
        return None
    return cache_file("checked", f"{digest.hexdigest()}.txt")


def _facts(captured: Captured) -> Iterator[object]:
    yield from (torch.__version__, captured.inputs, captured.calls)
    yield from (captured.parameters, captured.sizes, captured.together)
    for of_mode in captured.recorded:
        yield of_mode.events
        yield sorted((str(value), str(info)) for value, info in of_mode.infos.items())
    for path, module in captured.model.named_modules():
        kind = original_class(module)
        yield path, kind.__module__, kind.__qualname__, module.extra_repr(), module.training
    for name, parameter in captured.model.named_parameters():
        yield name, parameter.requires_grad


def _sources(model: nn.Module) -> list[Path]:
    """Return the files of the model's classes, and all that were imported from around them.

    The model may call any function there.  Those of torch are known by its version.

    Raises:
        FileNotFoundError: a class is in no file.
    """
    bases = {base for module in model.modules() for base in type(module).__mro__}
    names = {base.__module__ for base in bases if _package(base.__module__) not in _KNOWN}
    loaded = {
        name: Path(file)
        for name, module in list(sys.modules.items())
        if isinstance(file := getattr(module, "__dict__", {}).get("__file__"), str)
    }
    missing = names - loaded.keys()
    if missing:
        raise FileNotFoundError(", ".join(sorted(missing)))
    packages = {_package(name) for name in names}
    folders = {loaded[name].parent for name in names}
    found = {f for n, f in loaded.items() if _package(n) in packages or f.parent in folders}
    return sorted({*found, *Path(__file__).parent.glob("*.py")})


def _package(name: str) -> str:
    return name.partition(".")[0]


def _state_of(file: Path) -> tuple[str, int, int]:
    stat = file.stat()
    return str(file), stat.st_size, stat.st_mtime_ns


def _save(captured: Captured) -> str:
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix="penstock-check-", suffix=".txt", delete=False
    ) as file:
        file.writelines(f"{fact}\n" for fact in _facts(captured))
    return file.name
