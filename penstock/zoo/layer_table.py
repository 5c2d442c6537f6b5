"""A model as a table: its layers, what each gives, its parameters and its FLOPs."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from penstock.errors import ConfigError
from penstock.torch_private import data_dependent_errors, fake_tensors, tree_map_only

from .transformer_sizes import require_at_least

OWN = "(own)"
"""The name of the row for what the model has and computes itself, outside the layers shown."""


@dataclass(frozen=True, slots=True)
class Row:
    """One layer.

    `level` is 1 for the model's own layers, 2 for theirs.  `output` is the shape of what its first
    call gave, in lists and mappings like the value's own; None without example inputs, and where
    it was not called.  A parameter that layers share is counted in the first of them.
    """

    name: str
    module: str
    level: int
    calls: int
    output: Any
    parameters: int
    flops: int | None
    """Of all calls; 2 for a multiplication and an addition."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What `summary` found; printing it gives a table.

    `flops` is None without example inputs.  Rows of level 1 add up to the totals, unless one of
    them is also called inside another.
    """

    model: str
    rows: tuple[Row, ...]
    parameters: int
    trainable_parameters: int
    flops: int | None

    def to_json(self) -> str:
        """Write the summary as JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        head = ("layer", "module", "output", "parameters", "FLOPs")
        rows = [
            (
                "  " * (row.level - 1) + row.name,
                row.module,
                "" if row.output is None else _shown(row.output),
                f"{row.parameters:,}",
                "" if row.flops is None else f"{row.flops:,}",
            )
            for row in self.rows
        ]
        flops = "" if self.flops is None else f"{self.flops:,}"
        total = ("total", self.model, "", f"{self.parameters:,}", flops)
        lines = list(_columns([head, *rows, total]))
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


@dataclass(slots=True)
class _Calls:
    """What the calls of one module were seen to give and to cost."""

    count: int = 0
    output: Any = None
    flops: int = 0
    open_at: list[int] = field(default_factory=list)


class _Watch:
    """Notes what each module's calls do; `covered` are the FLOPs inside calls of `top`."""

    def __init__(self, top: set[nn.Module], flops_so_far: Callable[[], int]) -> None:
        self.calls: dict[nn.Module, _Calls] = {}
        self.covered = 0
        self._top, self._flops_so_far = top, flops_so_far
        self._open_top = 0

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        """Watch a model's modules while the block runs."""
        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        self.calls.setdefault(module, _Calls()).open_at.append(self._flops_so_far())
        self._open_top += module in self._top

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        calls = self.calls[module]
        flops = self._flops_so_far() - calls.open_at.pop()
        calls.flops += flops
        if not calls.count:
            calls.output = _shapes(output)
        calls.count += 1
        self._open_top -= module in self._top
        if module in self._top and not self._open_top:
            self.covered += flops


def summary(model: nn.Module, example_inputs: Any = None, *, depth: int = 1) -> Summary:
    """Tabulate a model's layers: the shapes of their outputs, parameters, forward FLOPs.

    The model is run once, as torch's fake tensors: nothing is computed and no memory is taken, so
    a model on the meta device, or one larger than the memory, is summarised in the time that its
    Python takes.  Its values, buffers and the random state stay as they are.  It is run in the
    mode it is in: call `eval()` first for the cost of an evaluation.

    FLOPs are torch's count (torch.utils.flop_counter): those of matrix products, convolutions and
    attention (causal or not: every query with every key), 2 for a multiplication and an addition.
    Normalisation, activations and other elementwise work count as 0.  A training step costs about
    three times the forward.

    Args:
        model: any module.
        example_inputs: what it is called with: a mapping of keyword arguments, a tuple of
            positional ones, or a single value; on any device, meta too.  Without them there are
            parameters only.
        depth: how many levels of layers are shown; entries of an nn.ModuleList or nn.ModuleDict
            stand for it, on its level.

    Raises:
        ConfigError: `depth` is below 1; the model's way depends on values, which fake tensors do
            not have.
    """
    require_at_least(1, depth=depth)
    listed = list(_listed(model, "", 1, depth))
    top = {module for _, module, level in listed if level == 1}
    with FlopCounterMode(display=False) as counter:
        watch = _Watch(top, counter.get_total_flops)
        if example_inputs is not None:
            with watch.on(model):
                _run(model, example_inputs)
    ran = example_inputs is not None
    counts = _parameter_counts(model)
    rows = []
    for name, module, level in listed:
        calls = watch.calls.get(module, _Calls())
        flops = calls.flops if ran else None
        kind = type(module).__name__
        rows.append(Row(name, kind, level, calls.count, calls.output, counts[module], flops))
    total = counter.get_total_flops() if ran else None
    own_flops = counter.get_total_flops() - watch.covered if ran else None
    own = counts[model] - sum(counts[module] for module in top)
    if own or own_flops:
        rows.append(Row(OWN, "", 1, 0, None, own, own_flops))
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Summary(type(model).__name__, tuple(rows), counts[model], trainable, total)


def _listed(
    module: nn.Module, prefix: str, level: int, depth: int
) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield the layers down to `depth`, lists replaced by their entries."""
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _listed(child, f"{full}.", level, depth)
            continue
        yield full, child, level
        if level < depth:
            yield from _listed(child, f"{full}.", level + 1, depth)


def _parameter_counts(model: nn.Module) -> dict[nn.Module, int]:
    """Count each module's parameters with those below it; one that is shared counts once."""
    counts = dict.fromkeys(model.modules(), 0)
    for name, parameter in model.named_parameters():
        *path, _ = name.split(".")
        for module in accumulate(path, nn.Module.get_submodule, initial=model):
            counts[module] += parameter.numel()
    return counts


def _run(model: nn.Module, example_inputs: Any) -> None:
    """Call a model on fakes.

    Raises:
        ConfigError: its way depends on values.
    """
    with (
        torch.random.fork_rng(devices=[]),
        fake_tensors(allow_non_fake_inputs=True),
        _written_out(),
        torch.no_grad(),
    ):
        state = {
            name: _fake(value)
            for name, value in [*model.named_parameters(), *model.named_buffers()]
        }
        args, kwargs = _as_call(tree_map_only(Tensor, _fake, example_inputs))
        try:
            functional_call(model, state, args, kwargs)
        except data_dependent_errors() as error:
            raise ConfigError(
                f"the forward of {type(model).__name__} depends on values ({error}), and a "
                "summary computes none. Leave example_inputs out to see the parameters alone, or "
                "give inputs with which the model does not look at values"
            ) from error


@contextmanager
def _written_out() -> Iterator[None]:
    """Run attention and recurrent layers as the products they are, which torch can count."""
    backends = torch.backends
    before = (
        backends.mkldnn.enabled,
        backends.cudnn.enabled,
        backends.mha.get_fastpath_enabled(),
    )
    _allow_fused(False, False, False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        _allow_fused(*before)


def _allow_fused(mkldnn: Any, cudnn: Any, attention: bool) -> None:
    torch.backends.mkldnn.enabled = mkldnn
    torch.backends.cudnn.enabled = cudnn
    torch.backends.mha.set_fastpath_enabled(attention)


def _fake(tensor: Tensor) -> Tensor:
    """Return a tensor without values; one on the meta device becomes a CPU tensor, as it would."""
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)), {}


def _shapes(value: Any) -> Any:
    """Return the shapes of a value's tensors, in lists and mappings; for all else, its type."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, Mapping):
        return {str(name): _shapes(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_shapes(part) for part in value]
    return type(value).__name__


def _shown(shapes: Any) -> str:
    if isinstance(shapes, dict):
        return "{" + ", ".join(f"{name}: {_shown(part)}" for name, part in shapes.items()) + "}"
    if isinstance(shapes, list):
        return "[" + ", ".join(map(_shown, shapes)) + "]"
    return str(shapes)


def _columns(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads: list[Callable[[str, int], str]] = [*[str.ljust] * 3, *[str.rjust] * 2]
    for row in rows:
        cells = [pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)]
        yield "  ".join(cells).rstrip()
