"""Divide the bytes that a layer saves: values between layers, and those of its own."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from penstock.costs.records import Value
from penstock.model.stage_plan import Crossing
from penstock.torch_private import storage_id


def values_of(
    crossings: Sequence[Crossing], same: Mapping[int, int] = MappingProxyType({})
) -> tuple[tuple[Value, ...], list[int]]:
    """Return the tensors between layers as values, and the storage of each; `same` are storages
    that are copies of others.
    """
    numbers: dict[int, int] = {}
    values, storages = [], []
    for crossing in crossings:
        for tensor in crossing.tensors:
            storage = storage_id(tensor)
            storage = same.get(storage, storage)
            storages.append(storage)
            values.append(
                Value(
                    crossing.producer,
                    crossing.consumers,
                    tensor.numel() * tensor.element_size(),
                    numbers.setdefault(storage, len(numbers)),
                    has_gradient=tensor.requires_grad,
                    is_weight=crossing.is_weight,
                )
            )
    return tuple(values), storages


def divided_bytes(
    at_boundary: Sequence[bool], storages: Sequence[int], saved: Mapping[int, int]
) -> tuple[int, tuple[int, ...]]:
    """Divide what a layer has saved, bytes by storage.

    `at_boundary` tells of each value whether the layer takes or gives it, `storages` where it is.

    Returns:
        Bytes in no such value, and the places of those that it saves.
    """
    touched = [place for place, touches in enumerate(at_boundary) if touches]
    inner = saved.keys() - {storages[place] for place in touched}
    return sum(saved[s] for s in inner), tuple(p for p in touched if storages[p] in saved)
