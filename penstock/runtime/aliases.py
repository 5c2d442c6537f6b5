"""Find tensors that share memory: a change of one in place would have to be seen in the other."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


class _Extent(NamedTuple):
    """Where a tensor lies: its addresses from `start` to before `end`, in bytes.

    Along dimension 0 it is rows of `width` bytes, one every `row` bytes.
    """

    start: int
    end: int
    number: int
    strides: tuple[int, ...]
    row: int
    width: int


def find_aliases(
    exported: Mapping[int, Sequence[Tensor]], known: Iterable[Tensor] = ()
) -> dict[int, frozenset[int]]:
    """Find, for each peer, the places of tensors that overlap in memory with another one.

    `known` are tensors that came in as such: what overlaps with one is an alias too.
    """
    places = [(peer, place) for peer, leaves in exported.items() for place in range(len(leaves))]
    tensors = [exported[peer][place] for peer, place in places]
    found: dict[int, set[int]] = {}
    for number in _overlapping([*tensors, *known]):
        if number < len(places):
            peer, place = places[number]
            found.setdefault(peer, set()).add(place)
    return {peer: frozenset(of_peer) for peer, of_peer in found.items()}


def _overlapping(tensors: Sequence[Tensor]) -> Iterator[int]:
    """Yield the numbers of the tensors that share a byte with another one, or might."""
    if len(tensors) < 2:
        return
    extents = [_extent(n, t) for n, t in enumerate(tensors) if t.layout is torch.strided]
    for crowd in _crowds([extent for extent in extents if extent.end > extent.start]):
        for extent in crowd:
            if any(other is not extent and _overlap(extent, other) for other in crowd):
                yield extent.number


def _extent(number: int, tensor: Tensor) -> _Extent:
    start, size, strides = tensor.data_ptr(), tensor.element_size(), tensor.stride()
    steps = [(n - 1) * stride * size for n, stride in zip(tensor.shape, strides, strict=True)]
    end = start + size + sum(steps) if tensor.numel() else start
    row = strides[0] * size if strides else 0
    return _Extent(start, end, number, strides, row, size + sum(steps[1:]))


def _crowds(extents: Sequence[_Extent]) -> Iterator[list[_Extent]]:
    """Yield groups that no address divides, nor, among slices of the same rows, a column.

    Sorting finds them, so that many tensors are not compared two by two:

        address ──►  a a a b b b . c d c d c d        {a}, {b}, {c, d}: c and d are columns of
                                                      the same rows, so {c}, {d}
    """
    for crowd in _divided(extents, lambda extent: (extent.start, extent.end)):
        if len(crowd) == 1:
            continue
        first = crowd[0]
        if not all(_has_rows_of(first, extent) for extent in crowd):
            yield crowd
            continue
        columns = list(_divided(crowd, partial(_columns, first)))
        if len(columns) == 1:
            yield crowd
        for column in columns if len(columns) > 1 else ():
            yield from _crowds(column)


def _divided(
    extents: Sequence[_Extent], interval: Callable[[_Extent], tuple[int, int]]
) -> Iterator[list[_Extent]]:
    """Divide into groups wherever an interval begins behind the end of all before it."""
    group: list[_Extent] = []
    furthest = 0
    for (start, end), extent in sorted((interval(extent), extent) for extent in extents):
        if group and start >= furthest:
            yield group
            group = []
        furthest = end if not group else max(furthest, end)
        group.append(extent)
    if group:
        yield group


def _has_rows_of(first: _Extent, extent: _Extent) -> bool:
    return extent.strides == first.strides and 0 < extent.width <= extent.row == first.row


def _columns(first: _Extent, extent: _Extent) -> tuple[int, int]:
    """Return the first byte of each row, and the one after the last; the whole row if it wraps."""
    begin = (extent.start - first.start) % first.row
    end = begin + extent.width
    return (begin, end) if end <= first.row else (0, first.row)


def _overlap(a: _Extent, b: _Extent) -> bool:
    """Tell whether two tensors share a byte; where their strides differ, whether they might."""
    if a.start >= b.end or b.start >= a.end:
        return False
    if not a.row or a.strides != b.strides or max(a.width, b.width) > a.row:
        return True
    distance = (b.start - a.start) % a.row  # slices of the same rows, side by side
    return distance < a.width or distance + b.width > a.row
