"""Find runs of equal layers in a chain, and shorten them: a few layers of each run are counted.

    embed ── block ── block ── block ── block ── block ── block ── head      the layers
    embed ── block ── block ── block ─────────────────── block ── head      the shortened ones
             first    alike    alike                     last

The two in the middle have equal layers on both sides, as those that are left out have.  They must
turn out equal (repeated.py), or all layers are counted.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from penstock.model.kept import UNCOUNTED, fields_of
from penstock.model.layer_list import ListOfModules
from penstock.model.layers import Layers
from penstock.model.stage_plan import Step, Value
from penstock.torch_private import storage_id

_COUNTED = 4
"""Layers of a run that are counted: the first, two in the middle, and the last."""
_PLAIN = {
    *(bool, int, float, complex, str, bytes, type(None), type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
"""Classes whose objects are equal if they compare equal, and never change."""
T = TypeVar("T")


class Repeat(NamedTuple):
    """Layers that are left out of a shortened chain."""

    layer: int
    """The layer of the shortened chain that they follow, and that stands for them."""
    paths: tuple[str, ...]
    """Prefixes of the names of their parameters, one for each layer."""


def counted_short(
    layers: Layers,
    count: Callable[[Layers, Sequence[Repeat]], T | None],
    own: Collection[int] = (),
    *,
    compile: bool = False,
) -> T:
    """Return what `count` finds for layers shortened by repeats, or else for all layers.

    Args:
        layers: the model.
        count: returns None if layers that are left out are not shown to equal those counted.  What
            it raises for shortened layers is not raised: all layers are counted.
        own: ids of tensors that count in another way than those of the same shape.
        compile: kernels may reach over several layers, so that all are counted.
    """
    short, repeats = (layers, ()) if compile else shortened(layers, own)
    if repeats:
        with suppress(Exception):
            found = count(short, repeats)
            if found is not None:
                return found
    found = count(layers, ())
    assert found is not None, "without repeats there is nothing to show"
    return found


def shortened(layers: Layers, own: Collection[int] = ()) -> tuple[Layers, tuple[Repeat, ...]]:
    """Return the layers without most of each run of equal ones, and what was left out."""
    if not isinstance(layers, ListOfModules):
        return layers, ()
    steps, repeats, gone = layers.steps, list[Repeat](), dict[int, int]()
    for run in _runs(steps, own):
        if len(run) > _COUNTED:
            left_out = run[_COUNTED - 1 : -1]
            repeats.append(Repeat(left_out[0] - 1 - len(gone), _paths(steps, left_out)))
            gone.update(dict.fromkeys(left_out, run[_COUNTED - 2]))
    kept = [step.index for step in steps if step.index not in gone]
    place = {-1: -1} | {index: n for n, index in enumerate(kept)}
    place |= {index: place[before] for index, before in gone.items()}

    def moved(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple((place[layer], number) for layer, number in values)

    short = tuple(
        replace(s, index=n, inputs=moved(s.inputs), outputs=moved(s.outputs))
        for n, s in enumerate(steps[index] for index in kept)
    )
    return replace(layers, steps=short, together=()), tuple(repeats)


def _paths(steps: Sequence[Step], numbers: Sequence[int]) -> tuple[str, ...]:
    return tuple(steps[n].path for n in numbers)


def _runs(steps: Sequence[Step], own: Collection[int]) -> list[list[int]]:
    """Return runs of layers that are equal, and share nothing with other layers.

    Each takes what the one before gives, and only the next one takes what it gives.
    """
    facts = [_Facts(step.module, own) for step in steps]
    holders = Counter(thing for of_layer in facts for thing in of_layer.owned)
    readers = Counter(value for step in steps for value in step.inputs)
    kinds: list[Hashable] = []
    for step, found in zip(steps, facts, strict=True):
        is_alone = all(holders[thing] == 1 for thing in found.owned)
        before = steps[step.index - 1].outputs if step.index else ()
        is_link = step.inputs == before and all(readers[v] == 1 for v in (*before, *step.outputs))
        may = found.is_shown and is_alone and is_link
        kinds.append((found.kind, len(step.outputs)) if may else step.index)
    groups = groupby(range(len(steps)), key=kinds.__getitem__)
    return [list(group) for _, group in groups]


class _Facts:
    """All that decides how a module runs without values; equal modules have an equal `kind`.

    `is_shown` is False if there is more: hooks, or attributes that are no plain values.
    """

    def __init__(self, module: nn.Module, own: Collection[int]) -> None:
        self._own = own
        self.is_shown = True
        self.owned: list[Hashable] = []
        """Ids of its modules, containers and memory of tensors, with repetitions."""
        self._seen: set[int] = set()
        self.kind = self._of(module)

    def _of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, nn.Module) or kind in _CONTAINERS:
            return self._of_holder(value)
        if kind is tuple or kind is torch.Size:
            return kind, tuple(map(self._of, value))
        module = getattr(value, "__module__", None) or ""
        is_function = isinstance(value, FunctionType | BuiltinFunctionType)
        self.is_shown &= is_function and module.partition(".")[0] == torch.__name__
        return kind, id(value)

    def _of_holder(self, value: Any) -> Hashable:
        self.owned.append(id(value))
        if id(value) in self._seen:
            return None
        self._seen.add(id(value))
        if isinstance(value, set):
            self.is_shown &= all(type(entry) in _PLAIN for entry in value)
            return set, frozenset((type(entry), entry) for entry in value)
        if isinstance(value, list):
            return list, tuple(map(self._of, value))
        fields = value
        if isinstance(value, nn.Module):
            fields = fields_of(value)
            self.is_shown &= not any(fields.get(name) for name in UNCOUNTED)
        return type(value), tuple((self._of(key), self._of(x)) for key, x in fields.items())

    def _of_tensor(self, tensor: Tensor) -> Hashable:
        is_usual = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        self.is_shown &= is_usual
        if not is_usual:
            return id(tensor)
        self.owned.append(("memory", storage_id(tensor)))
        is_number = not tensor.dim() and tensor.dtype is torch.long and not tensor.is_meta
        return (
            *(type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_meta),
            *(tensor.requires_grad, id(tensor) in self._own),
            int(tensor) if is_number else None,  # the only values that a count keeps
        )


_CONTAINERS = {list, dict, set, OrderedDict}
"""Classes of containers that may change, so that layers must not share one."""


def facts_of_inputs(inputs: Any) -> Hashable:
    """Return facts that decide how a layer runs on its inputs; None if there may be others."""
    storages: dict[int, int] = {}

    def facts(value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in (tuple, list, dict):
            parts = [*map(facts, value.items() if kind is dict else value)]
            return None if None in parts else (kind, *parts)
        if kind is not Tensor or not value.is_meta or value.layout is not torch.strided:
            return None
        storage = storages.setdefault(storage_id(value), len(storages))
        size, node = value.untyped_storage().nbytes(), value.grad_fn
        place = storage, size, value.storage_offset(), value.shape, value.stride()
        return (*place, value.dtype, value.requires_grad, node and node.name())

    return facts(inputs)
