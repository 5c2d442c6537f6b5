"""Materialize a model that was built on the meta device, where its stages run.

A process gives memory to what its own stages have, and to the buffers of modules outside blocks,
since the code between blocks runs on every stage.  Then each module fills its tensors as
libraries do when they build a model: by its `reset_parameters`, then by `_init_weights(module)` of
the model it belongs to.  What is drawn depends on the seed, the module's name and the number of
the draw there, and so not on the cut.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.model.materialize import (
    Made,
    Placed,
    forked_random,
    give_rest,
    may_be_absent,
    move_values,
    tensors_of,
    tied_groups,
    unsaved_buffers,
    with_memory,
)
from penstock.model.stage_plan import Step
from penstock.model.state import keeping_values
from penstock.torch_private import (
    TorchDispatchMode,
    arguments_of,
    buffers_of,
    parameters_of,
    reset_of,
    storage_id,
)

from .captured import Captured


@dataclass(frozen=True, slots=True)
class Part:
    """What one stage has: names of parameters, and layers; and where it runs."""

    parameters: Sequence[str]
    steps: Sequence[Step]
    device: torch.device

    @property
    def blocks(self) -> Collection[str]:
        """The names of the layers' blocks."""
        return {step.path for step in self.steps}


def move_or_make_parts(
    captured: Captured,
    parts: Sequence[Part],
    seed: int,
    *,
    draws: bool,
    placed: Placed | None = None,
) -> None:
    """Move the blocks of the stages of this process, or give them values.

    Unless it `draws`, what a file has the values of gets memory only.  With `placed`, block after
    block: of the others, what had no values has none meanwhile, as if other processes had it.

    Raises:
        ConfigError: nothing gives a tensor values.
    """
    model, made, done = captured.model, Made(), list[_Place]()
    where = {step.index: part.device for part in parts for step in part.steps}
    kept = {name for part in parts for name in part.parameters}
    for steps, devices in _units(captured, parts, by_block=placed is not None):
        bare = [place for place in _held(model, devices) if place[2].is_meta]
        fresh = _give_memory(model, devices if draws else _unread(model, devices), made)
        for step in steps:
            move_values(step.module, where[step.index])
        if fresh:
            used = set(where.values())
            with forked_random(used), torch.no_grad(), _keeping_others(model, fresh):
                _fill(model, fresh, seed)
        _give_memory(model, devices, made, later=placed is not None and bool(steps))
        if placed is not None:
            with _hidden(model, kept):
                placed(steps)
                give_rest(steps)
            done += [(places, name, places[name]) for places, name, _ in bare]
            _put(bare)
    _put(done)


_Place = tuple[dict[str, Any], str, Any]
"""(the dictionary in which a module has a tensor, its name there, the tensor)."""


def _put(places: Iterable[_Place]) -> None:
    for holder, name, tensor in places:
        holder[name] = tensor


def _held(model: nn.Module, names: Iterable[str]) -> list[_Place]:
    every = (_places(model, name) for name in names)
    held = [(places, last, places.get(last)) for places, last in every]
    return [place for place in held if place[2] is not None]


def _units(
    captured: Captured, parts: Sequence[Part], *, by_block: bool
) -> Iterator[tuple[Sequence[Step], dict[str, torch.device]]]:
    """Yield layers, and the device of each of their tensors: all in one, or those that share
    parameters, and in the end what no layer has.
    """
    steps, devices = [step for part in parts for step in part.steps], _devices(captured, parts)
    if not by_block:
        yield steps, devices
        return
    names: dict[int, list[str]] = {}
    for name in devices:
        places, last = _places(captured.model, name)
        names.setdefault(id(places.get(last)), []).append(name)
    units = []
    for group in tied_groups(steps):
        ids = {id(tensor): None for step in group for tensor in tensors_of(step.module)}
        units.append((group, {n: devices[n] for own in ids for n in names.pop(own, ())}))
    yield from units
    yield [], {n: devices[n] for own in names.values() for n in own}


def _unread(model: nn.Module, devices: Mapping[str, torch.device]) -> dict[str, torch.device]:
    """Return those names of tensors that a file may lack."""
    unsaved = {id(b) for module in model.modules() for b in unsaved_buffers(module)}
    is_left_out = may_be_absent(model)
    held = {
        name: id(places.get(last)) for name in devices for places, last in [_places(model, name)]
    }
    return {n: d for n, d in devices.items() if held[n] in unsaved or is_left_out(n)}


@contextmanager
def _hidden(model: nn.Module, kept: Collection[str]) -> Iterator[None]:
    """Let modules have no parameters but the `kept` ones meanwhile."""
    every = (name for name, _ in model.named_parameters(remove_duplicate=False))
    others = _held(model, [name for name in every if name not in kept])
    _put((places, name, None) for places, name, _ in others)
    try:
        yield
    finally:
        _put(others)


def _devices(captured: Captured, parts: Sequence[Part]) -> dict[str, torch.device]:
    """Return the device of each parameter and buffer of this process, by all their names."""
    found: dict[str, torch.device] = {}
    for part in parts:
        found.update(dict.fromkeys(part.parameters, part.device))
        for block in part.blocks:
            module = captured.blocks[block]
            buffers = module.named_buffers(prefix=block, remove_duplicate=False)
            found.update(dict.fromkeys((name for name, _ in buffers), part.device))
    own = {block for part in parts for block in part.blocks}
    elsewhere = tuple(f"{block}." for block in captured.blocks if block not in own)
    for name, _ in captured.model.named_buffers(remove_duplicate=False):
        if parts and not name.startswith(elsewhere):
            found.setdefault(name, parts[0].device)
    return found


def _give_memory(
    model: nn.Module, devices: Mapping[str, torch.device], made: Made, *, later: bool = False
) -> dict[str, Tensor]:
    """Put tensors with memory where there are such on the meta device; give the new ones."""
    fresh = {}
    for name, device in devices.items():
        places, last = _places(model, name)
        tensor = places.get(last)
        if tensor is not None and tensor.is_meta:
            places[last] = fresh[name] = with_memory(tensor, device, made, later=later)
    return fresh


def _places(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the dictionary in which a module has the parameter or buffer, and its name there."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    return (parameters_of(owner) if last in parameters_of(owner) else buffers_of(owner)), last


@contextmanager
def _keeping_others(model: nn.Module, fresh: Mapping[str, Tensor]) -> Iterator[None]:
    """Leave what had values before as it was: a module may fill more than its own tensors."""
    new = {id(tensor) for tensor in fresh.values()}
    both: list[dict[str, Any]] = []
    for module in model.modules():
        both += (parameters_of(module), buffers_of(module))
    others = [
        (places, name, tensor)
        for places in both
        for name, tensor in places.items()
        if tensor is not None and not tensor.is_meta and id(tensor) not in new
    ]
    with keeping_values({id(tensor): tensor for _, _, tensor in others}.values()):
        yield
        for places, name, tensor in others:
            places[name] = tensor


def _fill(model: nn.Module, fresh: Mapping[str, Tensor], seed: int) -> None:
    """Let the modules that hold fresh tensors, and those around them, fill them.

    Raises:
        ConfigError: a tensor is left without values.
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
    left = [name for name, tensor in fresh.items() if not _is_filled(model, name, tensor, filling)]
    if left:
        raise _cannot_fill(model, left)


InitWeights = Callable[[nn.Module], Any]


def _around(
    model: nn.Module, names: Collection[str]
) -> Iterator[tuple[str, nn.Module, InitWeights | None]]:
    """Yield the modules with any of the tensors in them, and whose `_init_weights` is for them."""
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
    found: InitWeights | None = getattr(module, "_init_weights", None)
    if not callable(found):
        return None
    try:
        inspect.signature(found).bind(module)
    except TypeError:  # another function of that name
        return None
    return found


class _Filling(TorchDispatchMode):
    """Keys each draw by the module that draws and by its number there; notes what is written.

    Tensors that other processes have draw as well, without values, so that they are counted.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.written: set[int] = set()
        self._place, self._draws = "", 0

    def begin(self, seed: int, place: str) -> None:
        """Begin what one module does."""
        self._place, self._draws = f"{seed} {place}", 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            key = blake2b(f"{self._place} {self._draws}".encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(key, "little"))
            self._draws += 1
        arguments = arguments_of(func)
        given = {**dict(zip((a.name for a in arguments), args, strict=False)), **(kwargs or {})}
        for argument in arguments:
            value = given.get(argument.name)
            if argument.is_write and isinstance(value, Tensor):
                self.written.add(storage_id(value))
        return func(*args, **(kwargs or {}))


def _is_filled(model: nn.Module, name: str, tensor: Tensor, filling: _Filling) -> bool:
    places, last = _places(model, name)
    now = places.get(last)
    if now is not tensor:
        return isinstance(now, Tensor) and not now.is_meta
    return not tensor.numel() or storage_id(tensor) in filling.written


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
