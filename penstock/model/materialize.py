"""Move a process's layers to their devices, or materialize them there from the meta device.

Each module initialises its own tensors: modules of a list by `reset_parameters`, modules of a
captured model as in `filling`.  The random numbers depend on the seed and on the layer's number or
the module's name, and not on the partition.

A process allocates the tensors of its stages.  Of a captured model it also allocates the buffers
outside blocks, as the code between blocks runs on every stage.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.torch_private import (
    buffers_of,
    move_tensors,
    parameters_of,
    reset_of,
    unsaved_buffers_of,
    version_counter,
)

from .filling import fill
from .owned import place_of
from .stage_plan import StagePlan, Step
from .state import keeping_values

Made = dict[int, tuple[Tensor, Tensor]]
"""(meta tensor, new tensor) by the id of the meta tensor."""


Mine = Sequence[tuple[StagePlan, torch.device]]
"""The stages of this process, each with its device."""
Placed = Callable[[Sequence[Step]], None]
"""A function that is called with layers that share weights, once they are on their device."""
Place = tuple[dict[str, Any], str, Any]
"""(the dictionary in which a module has a tensor, its name there, the tensor)."""


# -- layers of a list -----------------------------------------------------------------------------


def move_or_make(
    step: Step,
    device: torch.device,
    seed: int,
    made: Made | None = None,
    *,
    draws: bool = True,
    later: bool = False,
) -> None:
    """Move a layer; one without values is initialised by its own `reset_parameters`.

    The random numbers depend on `seed` and the layer's number, not on the partition.  Without
    `draws`, parameters and persistent buffers get memory only, as a file has their values.  With
    `later`, `give_rest` allocates the parameters, if nothing is drawn in this layer.  `made` has
    the tensors of other layers, which may be shared.  A ConfigError names a module without values
    and `reset_parameters`.
    """
    # 1. A layer with values moves; of any other, find the modules that must give values.
    if not any(tensor.is_meta for tensor in tensors_of(step.module)):
        step.module.to(device)
        return
    needed = own_tensors if draws else unsaved_buffers
    owners = [m for m in step.module.modules() if any(t.is_meta for t in needed(m))]
    for owner in owners:
        if reset_of(owner) is None or not all(t.is_meta for t in own_tensors(owner)):
            raise _cannot_make(step, owner)
    # 2. Move the tensors with values, and give memory to all others.
    later = later and not draws and not owners
    move_values(step.module, device)
    named = chain(
        step.module.named_parameters(remove_duplicate=False),
        step.module.named_buffers(remove_duplicate=False),
    )
    devices = dict.fromkeys((name for name, _ in named), device)
    _give_memory(step.module, devices, {} if made is None else made, later=later)
    # 3. Let the modules fill their tensors, and check by the version counters that they did.
    versions = {tensor: version_counter(tensor) for owner in owners for tensor in needed(owner)}
    with forked_random([device]):
        torch.manual_seed(
            (seed * 0x9E3779B97F4A7C15 + step.index * 0xBF58476D1CE4E5B9) & (2**63 - 1)
        )
        for owner in reversed(owners):  # a parent may refine its children
            reset = reset_of(owner)
            assert reset is not None
            reset()
    for owner in owners:
        if any(versions.get(tensor) == version_counter(tensor) for tensor in needed(owner)):
            raise _cannot_make(step, owner)


def _cannot_make(step: Step, module: nn.Module) -> ConfigError:
    return ConfigError(
        f"layer {step.label} was built on the meta device, and its {type(module).__name__} has no "
        "reset_parameters() that gives all of its parameters and buffers values. Add that method, "
        "or build the layer on a real device"
    )


# -- a captured model -----------------------------------------------------------------------------


def move_or_make_stages(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    mine: Mine,
    seed: int,
    *,
    draws: bool,
    placed: Placed | None = None,
) -> None:
    """Move the blocks of the stages `mine`, or initialise them; ConfigError if no module can.

    Without `draws`, tensors with values in a file get memory only.  With `placed`, blocks are
    placed one after the other; meanwhile the others have no values, as in another process.
    """
    made, done = Made(), list[Place]()
    where = {step.index: device for plan, device in mine for step in plan.steps}
    kept = {name for plan, _ in mine for name in plan.parameters}
    # 1. Place all tensors at once; with `placed`, a group of layers that share weights at a time.
    all_devices = _devices(model, blocks, mine)
    units = [([step for plan, _ in mine for step in plan.steps], all_devices)]
    if placed is not None:
        units = _units(model, units[0][0], all_devices)
    for steps, devices in units:
        # 2. Move the blocks with values, and fill the new tensors that no file has.
        bare = [place for place in _held(model, devices) if place[2].is_meta]
        fresh = _give_memory(model, devices if draws else _unread(model, devices), made)
        for step in steps:
            move_values(step.module, where[step.index])
        if fresh:
            used = set(where.values())
            with forked_random(used), torch.no_grad(), _keeping_others(model, fresh):
                fill(model, fresh, seed)
        # 3. Give memory to the rest; the group's weights are hidden while the next is placed.
        _give_memory(model, devices, made, later=placed is not None and bool(steps))
        if placed is not None:
            with _hidden(model, kept):
                placed(steps)
                give_rest(steps)
            done += [(holder, name, holder[name]) for holder, name, _ in bare]
            _put(bare)
    _put(done)


def _devices(
    model: nn.Module, blocks: Mapping[str, nn.Module], mine: Mine
) -> dict[str, torch.device]:
    """Return the device of each parameter and buffer of this process, by each of its names."""
    devices: dict[str, torch.device] = {}
    blocks_here: set[str] = set()
    for plan, device in mine:
        devices.update(dict.fromkeys(plan.parameters, device))
        for block in {step.path: None for step in plan.steps}:
            blocks_here.add(block)
            buffers = blocks[block].named_buffers(prefix=block, remove_duplicate=False)
            devices.update(dict.fromkeys((name for name, _ in buffers), device))
    elsewhere = tuple(f"{block}." for block in blocks if block not in blocks_here)
    for name, _ in model.named_buffers(remove_duplicate=False):
        if mine and not name.startswith(elsewhere):
            devices.setdefault(name, mine[0][1])
    return devices


def _units(
    model: nn.Module, steps: Sequence[Step], devices: Mapping[str, torch.device]
) -> list[tuple[list[Step], dict[str, torch.device]]]:
    """List groups of layers that share parameters, with the device of each of their tensors.

    The last group has no layers, and the other tensors.
    """
    names: dict[int, list[str]] = {}
    for name in devices:
        holder, last = place_of(model, name)
        names.setdefault(id(holder.get(last)), []).append(name)
    units = []
    for group in tied_groups(steps):
        ids = {id(tensor): None for step in group for tensor in tensors_of(step.module)}
        units.append((group, {n: devices[n] for i in ids for n in names.pop(i, ())}))
    return [*units, ([], {n: devices[n] for left in names.values() for n in left})]


def _unread(model: nn.Module, devices: Mapping[str, torch.device]) -> dict[str, torch.device]:
    """Return the names of tensors that a file may lack, with their devices."""
    unsaved = {id(b) for module in model.modules() for b in unsaved_buffers(module)}
    is_left_out = may_be_absent(model)
    held = {n: id(holder.get(last)) for n in devices for holder, last in [place_of(model, n)]}
    return {n: d for n, d in devices.items() if held[n] in unsaved or is_left_out(n)}


@contextmanager
def _hidden(model: nn.Module, kept: Collection[str]) -> Iterator[None]:
    """Hide all parameters except the `kept` ones in this context."""
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    others = _held(model, [name for name in names if name not in kept])
    _put((places, name, None) for places, name, _ in others)
    try:
        yield
    finally:
        _put(others)


@contextmanager
def _keeping_others(model: nn.Module, fresh: Mapping[str, Tensor]) -> Iterator[None]:
    """Restore the values of other tensors: a module may fill more than its own."""
    new = {id(tensor) for tensor in fresh.values()}
    both = ((parameters_of(module), buffers_of(module)) for module in model.modules())
    others = [
        (holder, name, tensor)
        for holder in chain.from_iterable(both)
        for name, tensor in holder.items()
        if tensor is not None and not tensor.is_meta and id(tensor) not in new
    ]
    with keeping_values({id(tensor): tensor for _, _, tensor in others}.values()):
        yield
        _put(others)


# -- tensors and their places ---------------------------------------------------------------------


def _give_memory(
    model: nn.Module, devices: Mapping[str, torch.device], made: Made, *, later: bool = False
) -> dict[str, Tensor]:
    """Replace meta tensors by tensors with memory; return the new ones by name."""
    fresh = {}
    for name, device in devices.items():
        holder, last = place_of(model, name)
        tensor = holder.get(last)
        if tensor is not None and tensor.is_meta:
            holder[last] = fresh[name] = with_memory(tensor, device, made, later=later)
    return fresh


def _held(model: nn.Module, names: Iterable[str]) -> list[Place]:
    places = (
        (holder, last, holder.get(last)) for holder, last in (place_of(model, n) for n in names)
    )
    return [place for place in places if place[2] is not None]


def _put(places: Iterable[Place]) -> None:
    for holder, name, tensor in places:
        holder[name] = tensor


def move_values(module: nn.Module, device: torch.device) -> None:
    """Move the tensors with values."""
    move_tensors(module, lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def with_memory(
    tensor: Tensor, device: torch.device, made: Made, *, later: bool = False
) -> Tensor:
    """Return a tensor with memory, but no values yet, like a meta tensor.

    A tied tensor gets one new tensor.  With `later`, a parameter gets its shape, and one element
    of memory.
    """
    if id(tensor) not in made:
        if later and isinstance(tensor, nn.Parameter) and tensor.is_contiguous():
            new = torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape)
        else:
            new = torch.empty_like(tensor, device=device, requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
        new.__dict__.update(tensor.__dict__)  # attributes that libraries set
        new.__dict__.pop("_is_hf_initialized", None)  # transformers would not fill it
        made[id(tensor)] = tensor, new
    return made[id(tensor)][1]


def has_memory(tensor: Tensor) -> bool:
    """Tell whether each element has its own memory."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def give_rest(steps: Iterable[Step]) -> None:
    """Allocate the parameters of layers that were created with `later`."""
    for parameter in (p for step in steps for p in step.module.parameters() if not p.is_meta):
        if not has_memory(parameter):
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)


def tied_groups(steps: Iterable[Step]) -> list[list[Step]]:
    """Group layers that share parameters; most groups have one layer."""
    groups: list[tuple[set[int], list[Step]]] = []
    for step in steps:
        ids = set(map(id, step.module.parameters()))
        tied = [group for group in groups if group[0] & ids]
        groups = [group for group in groups if not group[0] & ids]
        together = [*chain.from_iterable(members for _, members in tied), step]
        groups.append((ids.union(*(known for known, _ in tied)), together))
    return [members for _, members in groups]


def forked_random(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Restore the random states of the CPU and of `devices` afterwards."""
    return torch.random.fork_rng([device.index for device in devices if device.type == "cuda"])


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module itself."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def unsaved_buffers(module: nn.Module) -> list[Tensor]:
    """Return the non-persistent buffers of a module itself."""
    buffers = (buffers_of(module).get(name) for name in unsaved_buffers_of(module))
    return [buffer for buffer in buffers if buffer is not None]


def may_be_absent(original: nn.Module) -> Callable[[str], bool]:
    """Return a test for names that a model's class does not save, or that its files may lack.

    Their values are fixed: the model's own code sets them in a new model.
    """
    kinds = ("_keys_to_ignore_on_save", "_keys_to_ignore_on_load_missing")
    patterns = [re.compile(p) for kind in kinds for p in getattr(original, kind, None) or ()]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module and those inside it."""
    return chain(module.parameters(), module.buffers())
