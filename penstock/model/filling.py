"""Initialise the new tensors of a captured model by the code of its modules.

Each module runs `reset_parameters`, then the `_init_weights(module)` of its model.  The seed, the
module's name and the number of the draw in the module determine each random draw.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.torch_private import (
    TorchDispatchMode,
    arguments_of,
    parameters_of,
    reset_of,
    storage_id,
)

from .owned import place_of

InitWeights = Callable[[nn.Module], Any]


def fill(model: nn.Module, fresh: Mapping[str, Tensor], seed: int) -> None:
    """Initialise fresh tensors by the modules that hold them, and by the modules around these.

    A ConfigError names the tensors that have no values afterwards.
    """
    filling = _Filling()
    modules = list(reversed([*_around(model, fresh)]))  # a parent may refine its children
    with filling:
        for path, module, _ in modules:
            if (reset := reset_of(module)) is not None:
                filling.begin(seed, f"reset {path}")
                reset()
        for path, module, init_weights in modules:
            if init_weights is not None:
                filling.begin(seed, f"init {path}")
                init_weights(module)
    places = {name: place_of(model, name) for name in fresh}
    now = {name: holder.get(last) for name, (holder, last) in places.items()}
    left = [name for name, tensor in fresh.items() if not filling.has_filled(tensor, now[name])]
    if left:
        raise _cannot_fill(model, left)


def _around(
    model: nn.Module, names: Collection[str]
) -> Iterator[tuple[str, nn.Module, InitWeights | None]]:
    """Yield the modules that contain any of the tensors, each with its `_init_weights`."""
    paths = {""}
    for name in names:
        while name := name.rpartition(".")[0]:
            paths.add(name)
    responsible: dict[str, InitWeights | None] = {}
    for path, module in model.named_modules():
        outer = responsible[path.rpartition(".")[0]] if path else None
        responsible[path] = _init_weights_of(module) or outer
        if path in paths:
            yield path, module, responsible[path]


def _init_weights_of(module: nn.Module) -> InitWeights | None:
    init_weights: InitWeights | None = getattr(module, "_init_weights", None)
    if not callable(init_weights):
        return None
    try:
        inspect.signature(init_weights).bind(module)
    except TypeError:  # another function of that name
        return None
    return init_weights


class _Filling(TorchDispatchMode):
    """Seeds each draw by the module and the number of the draw; records the tensors written.

    Tensors of other processes draw on the meta device, so that they count too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.written: set[int] = set()
        self._place, self._draws = "", 0

    def begin(self, seed: int, place: str) -> None:
        self._place, self._draws = f"{seed} {place}", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            key = blake2b(f"{self._place} {self._draws}".encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(key, "little"))
            self._draws += 1
        # A tensor that an operator writes has values, whichever operator it is.
        arguments = arguments_of(func)
        values = {**dict(zip((a.name for a in arguments), args, strict=False)), **(kwargs or {})}
        for argument in arguments:
            value = values.get(argument.name)
            if argument.is_write and isinstance(value, Tensor):
                self.written.add(storage_id(value))
        return func(*args, **(kwargs or {}))

    def has_filled(self, tensor: Tensor, now: Any) -> bool:
        """Tell whether a fresh tensor, or its replacement `now`, has values."""
        if now is not tensor:
            return isinstance(now, Tensor) and not now.is_meta
        return not tensor.numel() or storage_id(tensor) in self.written


def _cannot_fill(model: nn.Module, names: Sequence[str]) -> ConfigError:
    lines = []
    for name in names:
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        kind = "parameter" if last in parameters_of(owner) else "buffer"
        lines.append(f"  {kind} {last!r} of {path!r} ({type(owner).__name__})")
    return ConfigError(
        "the model was built on the meta device, and nothing gives these tensors values:\n"
        + "\n".join(lines)
        + "\nFill them in reset_parameters() of their module or in _init_weights(module) of the "
        "model, load parameters and persistent buffers (Pipeline(..., weights=folder)), or build "
        "these modules on a real device"
    )
