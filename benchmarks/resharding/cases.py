"""The layouts between which Alpa and its follow-up send tensors (Zheng et al. 2022, Zhuang et al.
2023): nine from mesh to mesh, and seven from one device.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.sharding.layouts import I, Layout, S, Shape, Slice, even

from .plan import Resharding

Held = list[tuple[int, Slice]]


class Case(NamedTuple):
    """A tensor, the mesh and layout that hold it and that want it, and in how many messages it
    crosses.
    """

    shape: Shape
    mesh: Shape
    before: Layout
    next_mesh: Shape
    after: Layout
    num_messages: int


ALL = (1024, 1024, 512)
N_TO_M = {
    "1": Case(ALL, (2, 4), (S(0), I), (2, 4), (S(0), I), 8),
    "2": Case(ALL, (2, 4), (I, I), (2, 4), (S(0), I), 8),
    "3": Case(ALL, (2, 4), (S(1), I), (2, 4), (S(0), I), 8),
    "4": Case(ALL, (2, 4), (S(1), S(1)), (2, 4), (S(0), S(0)), 64),
    "5": Case(ALL, (2, 4), (I, S(0)), (2, 4), (S(0), I), 8),
    "6": Case((3072, 1024, 170), (2, 4), (S(0), I), (3, 4), (S(0), I), 16),
    "7": Case(ALL, (1, 4), (I, S(0)), (2, 4), (I, I), 8),
    "8": Case(ALL, (1, 4), (I, S(0)), (2, 4), (I, I), 8),
    "9": Case(ALL, (2, 4), (S(1), I), (2, 4), (S(2), I), 8),
}
"""In the published list 7 and 8 are alike."""
MESHES = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2))
ONE_TO_M = {
    f"1 to {rows} x {columns}": Case(
        (2**28,), (1, 1), (I, I), (rows, columns), (I, I), rows * columns
    )
    for rows, columns in MESHES
}


def laid_out(shape: Shape, mesh: Shape, layout: Layout, first: int = 0) -> Held:
    """Return what each rank of a mesh has in a layout; a later axis cuts what an earlier left."""
    found = []
    for rank, places in enumerate(product(*map(range, mesh)), start=first):
        offsets, lengths = [0] * len(shape), list(shape)
        for place, count, state in zip(places, mesh, layout, strict=True):
            if isinstance(state, S):
                sizes = even(lengths[state.dim], count)
                offsets[state.dim] += sum(sizes[:place])
                lengths[state.dim] = sizes[place]
        found.append((rank, Slice(tuple(offsets), tuple(lengths), shape)))
    return found


def cut(part: Slice, own: Slice, tensor: Tensor) -> Tensor:
    """Return the view of a part of the whole in a tensor that is the slice `own` of it."""
    offsets = tuple(a - b for a, b in zip(part.offsets, own.offsets, strict=True))
    return tensor[Slice(offsets, part.lengths, own.lengths).indices]


def pack(parts: Iterable[Slice], own: Slice, tensor: Tensor) -> Tensor:
    """Put parts of a rank's slice into one message."""
    return torch.cat([tensor.new_empty(0), *(cut(s, own, tensor).reshape(-1) for s in parts)])


def unpack(message: Tensor, parts: Sequence[Slice], own: Slice, tensor: Tensor) -> None:
    """Put the parts in a message into a rank's slice."""
    for part, values in zip(parts, message.split([prod(s.lengths) for s in parts]), strict=True):
        cut(part, own, tensor).copy_(values.view(part.lengths))


def carry_out(plan: Resharding, tensors: Mapping[int, Tensor]) -> None:
    """Do in one process what the ranks do: fill the receivers' tensors from the senders'."""
    for receiver, own in plan.wanted.items():
        for sender, parts in plan.receives(receiver).items():
            message = pack(parts, plan.held[sender], tensors[sender])
            unpack(message, parts, own, tensors[receiver])
    for group in plan.spreading:
        for sender, got in group.items():
            message = pack(got, plan.wanted[sender], tensors[sender])
            for receiver in group.keys() - {sender}:
                unpack(message, got, plan.wanted[receiver], tensors[receiver])
