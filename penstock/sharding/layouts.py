"""Layouts: the parts of a value and of its gradient on the devices along an axis of a mesh.

    state   value                     gradient                 such as
    I       the whole, on each        the whole, on each       parameters at rest
    R       the whole, on each        parts of a sum           the input of a product by columns
    P       parts of a sum            the whole, on each       the result of a product by rows
    S(d)    slices along dimension d  slices along d           a shard

A layout has a state for each axis of the mesh.  A conversion of a value is paired with one of its
gradient, the other way: `moves` knows all thirteen.  (spmd_types of PyTorch has the same states;
GSPMD, Xu et al. 2021, has no I, and so no rule that says when gradients are summed.)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy

Numbers = numpy.ndarray[Any, Any]

FEW_BYTES = 1 << 16
"""Bytes below which a message crosses faster than a collective begins."""


class Whole(Enum):
    """The states in which each device has a tensor of the whole size."""

    I = "I"  # noqa: E741 - the name that it has everywhere
    R = "R"
    P = "P"

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return self.value


I, R, P = Whole  # noqa: E741


Shape = tuple[int, ...]
Sizes = tuple[int, ...]
"""The lengths of a dimension's slices, in the order of an axis."""


@dataclass(frozen=True, slots=True)
class S:
    """Slices along a dimension, in the order of the axis."""

    dim: int
    sizes: Sizes = ()
    """Lengths of the slices, perhaps uneven; a plan knows none.  If an earlier axis cuts the same
    dimension, they divide the slice of this device.
    """

    def __repr__(self) -> str:
        return f"S({self.dim})"


State = Whole | S
Layout = tuple[State, ...]
"""One state for each axis of a mesh."""


def samples(layout: Layout) -> int:
    """Return the number of samples of a tensor that is cut along samples; 0 for others."""
    return sum(state.sizes) if isinstance(state := layout[0], S) else 0


def as_on(layout: Layout, mesh: Sequence[int], place: int) -> Layout:
    """Return a layout for the device at a place of a mesh.

    A layout of a mesh of another shape becomes even slices of samples.
    """
    counts = [len(state.sizes) if isinstance(state, S) else 0 for state in layout]
    if len(counts) == len(mesh) and all(
        n in (0, own) for n, own in zip(counts, mesh, strict=True)
    ):
        return layout
    number, inner, states = samples(layout), prod(mesh), list[State]()
    for count in mesh:
        inner //= count
        sizes = even(number, count)
        states.append(S(0, sizes))
        number, place = sizes[place // inner], place % inner
    return tuple(states)


def layout_text(layout: Layout) -> str:
    """Return a layout as plans write it: its states along all axes."""
    return "·".join(map(repr, layout))


def layout_of(text: str) -> Layout:
    """Read a layout that `layout_text` wrote."""
    parts = [part.strip() for part in text.split("·")]
    return tuple(S(int(part[2:-1])) if part[0] == "S" else Whole(part) for part in parts)


class Move(Enum):
    """An operation on the tensors of an axis: a collective, or a local one."""

    NONE = "none"
    SLICE = "slice"
    """Keep this device's slice of the whole."""
    PAD = "pad"
    """Put this device's slice into a whole of zeros."""
    MASK = "mask"
    """Keep the whole on the first device, zeros on all others."""
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"


_PAIRS: dict[tuple[Whole | type[S], Whole | type[S]], tuple[Move, Move]] = {
    (I, R): (Move.NONE, Move.ALL_REDUCE),
    (I, P): (Move.MASK, Move.NONE),
    (I, S): (Move.SLICE, Move.ALL_GATHER),
    (R, I): (Move.NONE, Move.MASK),
    (R, P): (Move.MASK, Move.MASK),
    (R, S): (Move.SLICE, Move.PAD),
    (P, I): (Move.ALL_REDUCE, Move.NONE),
    (P, R): (Move.ALL_REDUCE, Move.ALL_REDUCE),
    (P, S): (Move.REDUCE_SCATTER, Move.ALL_GATHER),
    (S, I): (Move.ALL_GATHER, Move.SLICE),
    (S, R): (Move.ALL_GATHER, Move.REDUCE_SCATTER),
    (S, P): (Move.PAD, Move.SLICE),
    (S, S): (Move.ALL_TO_ALL, Move.ALL_TO_ALL),
}
"""(state before, state after) -> (move of the value, move of its gradient)."""


def moves(before: State, after: State) -> tuple[Move, Move]:
    """Return the moves of a conversion: of the value, and of its gradient on the way back."""
    if before == after:
        return Move.NONE, Move.NONE
    old, new = (S if isinstance(state, S) else state for state in (before, after))
    return _PAIRS[old, new]


def even(length: int, count: int) -> Sizes:
    """Return the lengths of `count` slices, which differ by 1 at most, the longer ones first."""
    return tuple(length // count + (n < length % count) for n in range(count))


def shrunk(in_step: Layout, shape: Sequence[int], sizes: Sequence[int]) -> Layout:
    """Cut a weight along each axis along which it is whole; `sizes` are the axes' lengths.

    The longest dimension is cut, one that divides evenly before others.
    """
    lengths = list(shape)
    for state, size in zip(in_step, sizes, strict=True):
        if isinstance(state, S):
            lengths[state.dim] //= size
    rest = list(in_step)
    for number, size in enumerate(sizes):
        later = {state.dim for state in rest[number + 1 :] if isinstance(state, S)}
        dims = [d for d, length in enumerate(lengths) if length > 1 and d not in later]
        if isinstance(rest[number], S) or size == 1 or not dims:
            continue
        dim = max(dims, key=lambda d: (lengths[d] % size == 0, lengths[d]))
        rest[number] = S(dim)
        lengths[dim] //= size
    return tuple(rest)


def steps(before: Layout, after: Layout) -> Iterator[tuple[int, State, State]]:
    """Yield the conversions, each along one axis, that lead from one layout to another.

    If two axes cut one dimension, the later one cuts the slices of the earlier one.  So the later
    axis is made whole before the earlier one changes:

        (S(0), S(0)) -> (I, S(0))      axis 1 to I, axis 0 to I, axis 1 to S(0)
    """
    current = list(before)
    for axis, wanted in enumerate(after):
        if current[axis] == wanted:
            continue
        dims = [state.dim for state in (current[axis], wanted) if isinstance(state, S)]
        for later in range(axis + 1, len(after)):
            state = current[later]
            if isinstance(state, S) and state.dim in dims:
                yield later, state, I
                current[later] = I
        if len(dims) > len(set(dims)):  # other slices of the same dimension
            yield axis, current[axis], I
            current[axis] = I
        yield axis, current[axis], wanted
        current[axis] = wanted


@lru_cache(maxsize=1 << 16)
def moves_of(before: Layout, after: Layout) -> list[tuple[int, Shape, tuple[Move, Move]]]:
    """Return the steps of a conversion: axis, other axes that cut the value, and the moves."""
    conversion, current = [], list(before)
    for axis, old, new in steps(before, after):
        others = (n for n, state in enumerate(current) if n != axis and isinstance(state, S))
        conversion.append((axis, tuple(others), moves(old, new)))
        current[axis] = new
    return conversion


Step = tuple[int, Shape, Move]
"""A move along an axis, and the other axes that cut the value."""


@lru_cache(maxsize=1 << 12)
def moves_between(
    before: tuple[Layout, ...], after: tuple[Layout, ...]
) -> tuple[list[Step], list[Numbers], Numbers]:
    """Return `moves_of` for all pairs of two lists of layouts, as arrays.

    Three axes have hundreds of layouts, and a table a hundred thousand pairs.

    Returns:
        The different moves.  For each step of any conversion, the numbers of its moves by
        [before, after, value or gradient]; conversions without it have a move of kind NONE there.
        The pairs that differ, [before, after].
    """
    num_axes, kinds = len(before[0]), [*Move]
    states = {state: n for n, state in enumerate(dict.fromkeys((I, *chain(*before, *after))))}
    dims = numpy.array([state.dim if isinstance(state, S) else -1 for state in states])
    pairs = [[[kinds.index(x) for x in moves(old, new)] for new in states] for old in states]
    kind_of, is_cut = numpy.array(pairs), dims >= 0
    rows, columns = (numpy.array([[states[x] for x in y] for y in way]) for way in (before, after))
    current, wanted = [*rows.T[:, :, None]], columns.T[:, None, :]
    differs = (rows[:, None] != columns).any(axis=-1)
    taken = [numpy.zeros((*differs.shape, 2), dtype=int)]

    def take(where: Numbers, axis: int, new: Numbers | int) -> None:
        if where.any():
            number = kind_of[current[axis], new] + (axis << num_axes) * len(kinds)
            for other in {*range(num_axes)} - {axis}:
                number = number + (is_cut[current[other]] * (len(kinds) << other))[..., None]
            taken.append(numpy.where(where[..., None], number, 0))
            current[axis] = numpy.where(where, new, current[axis])

    for axis in range(num_axes):
        # as in `steps`
        is_other = current[axis] != wanted[axis]
        old, new = dims[current[axis]], dims[wanted[axis]]
        for later in range(axis + 1, num_axes):
            own = dims[current[later]]
            take(is_other & (own >= 0) & ((own == old) | (own == new)), later, states[I])
        take(is_other & (old == new) & (old >= 0), axis, states[I])
        take(is_other, axis, wanted[axis])
    is_used = numpy.zeros(num_axes * len(kinds) << num_axes, dtype=bool)
    for one in taken:
        is_used[one] = True
    found = list[Step]()
    for number in map(int, numpy.flatnonzero(is_used)):
        axis_and_cut, kind = divmod(number, len(kinds))
        cut = tuple(n for n in range(num_axes) if axis_and_cut >> n & 1)
        found.append((axis_and_cut >> num_axes, cut, kinds[kind]))
    places = numpy.cumsum(is_used) - 1
    return found, [places[one].astype(numpy.uint8) for one in taken], differs


class Slice(NamedTuple):
    """A part of a tensor: offsets and lengths by dimension, and the shape of the whole."""

    offsets: Shape
    lengths: Shape
    whole: Shape

    @classmethod
    def of_all(cls, shape: Shape) -> "Slice":
        """Return the slice that is all of a tensor."""
        return cls((0,) * len(shape), shape, shape)

    @property
    def is_all(self) -> bool:
        """True if the slice is all of the tensor."""
        return self.lengths == self.whole

    @property
    def indices(self) -> tuple[slice, ...]:
        """The indices that cut the part out of the whole tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.offsets, self.lengths, strict=True))
