"""Compute the lengths and places of slices in a call's arguments and results.

    view (B, T, C) to (B * T, C), cut along B = 5 on two devices, T = 4:

    takes  S(0) of 3 and 2 samples    ──►    gives  S(0) of 12 and 8 rows

All dimensions of one letter of a rule are cut alike: as one of its tensors is cut already, or
evenly.  All devices of an axis compute the same, since each knows all slices.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from penstock.model.entries import whole_size
from penstock.sharding.layouts import Layout, S, Shape, Sizes, Slice, State, even
from penstock.sharding.plan import PlannedCall
from penstock.sharding.rules import Choice

if TYPE_CHECKING:
    from penstock.mesh.collectives import Collectives


class Sized(NamedTuple):
    """The layouts of a call's arguments and results, with sizes.

    `shapes` are those of the whole results, if dimensions are merged or divided.
    """

    takes: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    shapes: tuple[Shape, ...] | None = None


class Local(NamedTuple):
    """The places of one call's shards in their wholes, on this device."""

    sized: Sized
    axes: "Sequence[Collectives]"

    def is_cut(self, layout: Layout, dim: int) -> bool:
        """Tell whether an axis slices a dimension."""
        return any(isinstance(state, S) and state.dim == dim for state in layout)

    def start(self, layout: Layout, dim: int) -> int:
        """Return the first position of this device's slice along a dimension, over all axes."""
        return sum(
            sum(state.sizes[: axis.rank])
            for axis, state in zip(self.axes, layout, strict=True)
            if isinstance(state, S) and state.dim == dim
        )

    def whole_shape(self, here: Sequence[int], layout: Layout) -> list[int]:
        """Return the shape of the whole from that of this device's part."""
        return list(whole_size(tuple(here), None, layout)[0])

    def part_of(self, whole: Tensor, layout: Layout) -> Tensor:
        """Return this device's part of a whole tensor, as a view."""
        return whole[slice_here(whole.shape, layout, self.axes).indices]


def slice_here(shape: Sequence[int], layout: Layout, axes: "Sequence[Collectives]") -> Slice:
    """Return the slice of a whole tensor on this device."""
    offsets, lengths = [0] * len(shape), list(shape)
    for state, axis in zip(layout, axes, strict=True):
        if isinstance(state, S):
            offsets[state.dim] += sum(state.sizes[: axis.rank])
            lengths[state.dim] = state.sizes[axis.rank]
    return Slice(tuple(offsets), tuple(lengths), tuple(shape))


Function = Callable[..., Tensor]
"""A function of torch, or of an opaque module."""
Kernel = Callable[[Function, Any, Any, Local], Any]
"""(function, arguments, keyword arguments, places of the shards) -> this device's result."""


def size(
    planned: PlannedCall,
    shapes: Sequence[Shape],
    before: Sequence[Layout],
    gives: tuple[Shape, ...] | None,
    axes: "Sequence[Collectives]",
) -> Sized:
    """Return a call's layouts with sizes, for whole arguments of `shapes` held as `before`.

    If dimensions are merged or divided, `gives` are the shapes of the whole results.  Slices then
    begin at positions that exist in both shapes.
    """
    # 1. Begin with the whole shapes; results whose shape is unknown follow the arguments.
    takes = [_Growing(shape) for shape in shapes]
    results = [_Growing(shape) for shape in gives or [None] * len(planned.gives)]
    # 2. Cut axis by axis: a later axis cuts the slices of the earlier ones.
    for number, (axis, choice) in enumerate(zip(axes, planned.choices, strict=True)):
        now = [layout[number] for layout in before]
        units, parts, length = _parts(choice, takes, results, now, axis.size)
        for states, growing in ((choice.takes, takes), (choice.gives, results)):
            for state, tensor in zip(states, growing, strict=True):
                tensor.grow(state, units, parts, (length, axis.rank))
    return Sized(
        tuple(_the_same(tuple(tensor.layout)) for tensor in takes),
        tuple(_the_same(tuple(tensor.layout)) for tensor in results),
        gives,
    )


@lru_cache(maxsize=4096)
def _the_same(layout: Layout) -> Layout:
    """Return one object for equal layouts, so that comparing them is fast."""
    return layout


def size_like(
    layout: Layout, shape: Shape, before: Layout, axes: "Sequence[Collectives]"
) -> Layout:
    """Return a layout with sizes for a whole tensor: its current slices if they fit, else even."""
    tensor, keeps = _Growing(shape), True
    for axis, state, now in zip(axes, layout, before, strict=True):
        length = tensor.length(state) or 0
        parts = even(length, axis.size)
        if keeps and isinstance(now, S) and isinstance(state, S) and now.dim == state.dim:
            parts = now.sizes
        keeps = keeps and isinstance(now, S) == isinstance(state, S)
        tensor.grow(state, length, parts, (length, axis.rank))
        keeps = keeps and (not isinstance(now, S) or tensor.layout[-1] == now)
    return tuple(tensor.layout)


class _Growing:
    """A layout that grows axis by axis, and the lengths of this device's dimensions so far.

    Without a shape, slices of a result are as long as those of the call's arguments.
    """

    def __init__(self, shape: Shape | None) -> None:
        self.lengths = None if shape is None else list(shape)
        self.layout: list[State] = []

    def length(self, state: State) -> int | None:
        """Return the length of the cut dimension; None if it is unknown, or none is cut."""
        return self.lengths[state.dim] if isinstance(state, S) and self.lengths else None

    def grow(self, state: State, units: int, parts: Sizes, known: tuple[int, int]) -> None:
        """Add the state along the next axis; `known` is (length if the shape is unknown, rank)."""
        if isinstance(state, S):
            taken, rank = known
            length = self.length(state)
            length = taken if length is None else length
            times = length // units if units else 1
            state = S(state.dim, tuple(times * part for part in parts))
            if self.lengths:
                self.lengths[state.dim] = state.sizes[rank]
        self.layout.append(state)


def _parts(
    choice: Choice,
    takes: Sequence[_Growing],
    results: Sequence[_Growing],
    now: Sequence[State],
    count: int,
) -> tuple[int, Sizes, int]:
    """Return the number of units to share along an axis, each device's units, and a length.

    The length is that of the cut dimension of the first tensor.
    """
    # 1. Find the unit: the longest length that divides all of the letter's dimensions.
    known = [tensor.length(state) for state, tensor in zip(choice.takes, takes, strict=True)]
    made = [tensor.length(state) for state, tensor in zip(choice.gives, results, strict=True)]
    lengths = [length for length in (*known, *made) if length is not None]
    first = lengths[0] if lengths else 0
    units = gcd(*lengths, first // choice.piece)
    # 2. Share the units as an argument is cut already, if it is, so that nothing is sent.
    for length, wanted, state in zip(known, choice.takes, now, strict=True):
        if length and isinstance(wanted, S) and isinstance(state, S) and state.dim == wanted.dim:
            times = length // units
            if sum(state.sizes) == length and all(n % times == 0 for n in state.sizes):
                return units, tuple(n // times for n in state.sizes), first
    return units, even(units, count), first
