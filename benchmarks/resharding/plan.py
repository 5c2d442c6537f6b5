"""Resharding between meshes: plan the messages that turn the layout of one into the other's.

Each wanted element crosses once.  The ranks that want it then gather it inside their mesh (Alpa,
Zheng et al. 2022, section 6: the local all-gather).  Elements with the same holders and the same
receivers form a cell.  Both sides divide it evenly; two neighbouring marks bound a piece:

    held by 0 and 1        ├───── 0 ─────┼───── 1 ─────┤
    wanted by 2, 3 and 4   ├─── 2 ───┼── 3 ──┼─── 4 ───┤
    crossing               ├─ 0 to 2 ┼─0─┼─1─┼─ 1 to 4 ┤
    spreading              2, 3 and 4 gather what each of them got

A gradient goes back by the plan in which the two sides are exchanged.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from penstock.errors import PlanError
from penstock.sharding.layouts import Slice, even

Ranks = tuple[int, ...]
Ends = list[tuple[int, int]]
"""(end, rank), in order: the rank takes the elements from the end before its own up to its own."""

_OFF = 0.05
"""Share of a rank's part by which a mark may be off at each end: fewer, longer pieces cross."""


class Piece(NamedTuple):
    """A part of the tensor that a rank of one mesh sends to one of the other."""

    sender: int
    receiver: int
    part: Slice


@dataclass(frozen=True, slots=True)
class Resharding:
    """Pieces that cross between two meshes, and the gathers inside the receiving mesh.

    The ranks of a gather receive nearly equal numbers of elements; a rank may receive none.
    """

    held: Mapping[int, Slice]
    """The part of the tensor on each sending rank."""
    wanted: Mapping[int, Slice]
    """The part that each receiving rank needs."""
    crossing: Sequence[Piece]
    spreading: Sequence[Mapping[int, Sequence[Slice]]]
    """The gathers: parts that each rank of a group received, which all of the group want."""

    def sends(self, rank: int) -> dict[int, list[Slice]]:
        """Return the parts in a rank's message to each receiver, in the order that both know."""
        return _by_peer((p.receiver, p.part) for p in self.crossing if p.sender == rank)

    def receives(self, rank: int) -> dict[int, list[Slice]]:
        """Return the parts in the message of each sender to a rank, in the order both know."""
        return _by_peer((p.sender, p.part) for p in self.crossing if p.receiver == rank)


def _by_peer(pairs: Iterable[tuple[int, Slice]]) -> dict[int, list[Slice]]:
    parts_of: dict[int, list[Slice]] = {}
    for peer, part in pairs:
        parts_of.setdefault(peer, []).append(part)
    return parts_of


def plan_resharding(
    held: Sequence[tuple[int, Slice]], wanted: Sequence[tuple[int, Slice]]
) -> Resharding:
    """Plan the messages of a tensor from the ranks of one mesh to those of another.

    Args:
        held: the part on each rank of the sending mesh; several may have the same.
        wanted: the part for each rank of the receiving mesh.

    No rank is in both.  The order in which ranks are given does not matter.

    Raises:
        PlanError: a rank wants elements that no rank holds.
    """
    has, wants = dict(held), dict(wanted)
    # 1. cells, each divided evenly among its senders and among its receivers
    cells = list(_cells(has, wants))
    sent = _divide([(box, senders) for box, senders, _ in cells])
    got = _divide([(box, receivers) for box, _, receivers in cells])
    # 2. pieces between the marks of both, rounded to rows of the cell's last dimensions
    crossing: list[Piece] = []
    spreading: dict[Ranks, dict[int, list[Slice]]] = {}
    for (box, senders, receivers), *ends in zip(cells, sent, got, strict=True):
        dims = sorted(range(len(box.lengths)), key=box.lengths.__getitem__, reverse=True)
        share = prod(box.lengths) / max(len(senders), len(receivers))
        unit = _row_of(box, dims, 2 * _OFF * share)
        sides = [[((end + unit // 2) // unit * unit, r) for end, r in side] for side in ends]
        marks = {0}.union(*(dict(side) for side in sides))
        for begin, end in pairwise(sorted(marks)):
            sender, receiver = (next(r for at, r in side if at >= end) for side in sides)
            parts = list(_boxes(box, dims, begin, end))
            crossing += [Piece(sender, receiver, part) for part in parts]
            if len(receivers) > 1:
                spreading.setdefault(receivers, {r: [] for r in receivers})[receiver] += parts
    return Resharding(has, wants, crossing, list(spreading.values()))


def _cells(
    held: Mapping[int, Slice], wanted: Mapping[int, Slice]
) -> Iterator[tuple[Slice, Ranks, Ranks]]:
    """Cut the tensor where slices begin or end; yield wanted cells, holders and receivers."""
    slices = {**held, **wanted}
    whole = next((s.whole for s in slices.values()), ())
    along: list[list[tuple[int, int, set[int]]]] = []
    for dim in range(len(whole)):
        spans = {r: (s.offsets[dim], s.offsets[dim] + s.lengths[dim]) for r, s in slices.items()}
        cuts = pairwise(sorted({mark for span in spans.values() for mark in span}))
        along.append(
            [(a, b, {r for r, (x, y) in spans.items() if x <= a and b <= y}) for a, b in cuts]
        )
    for cell in product(*along):
        begins, lengths = tuple(a for a, _, _ in cell), tuple(b - a for a, b, _ in cell)
        ranks = sorted(set(slices).intersection(*(ranks for _, _, ranks in cell)))
        senders, receivers = (tuple(r for r in ranks if r in side) for side in (held, wanted))
        if receivers and not senders:
            raise PlanError(
                f"rank {receivers[0]} wants {lengths} elements at {begins} of a tensor of shape "
                f"{whole}, and none of the ranks {sorted(held)} holds them; give slices of all"
            )
        if receivers:
            yield Slice(begins, lengths, whole), senders, receivers


def _divide(cells: Sequence[tuple[Slice, Ranks]]) -> list[Ends]:
    """Divide the cells of each group of ranks, laid in a row, evenly among the group."""
    of_group: dict[Ranks, list[int]] = {}
    for number, (_, group) in enumerate(cells):
        of_group.setdefault(group, []).append(number)
    loads = {rank: 0 for group in of_group for rank in group}
    divided: list[Ends] = [[] for _ in cells]
    for group in sorted(of_group, key=lambda ranks: (len(ranks), ranks)):  # least choice first
        sizes = [prod(cells[number][0].lengths) for number in of_group[group]]
        begin, taken = 0, _pour(sum(sizes), group, loads)
        for number, size in zip(of_group[group], sizes, strict=True):
            divided[number] = [(min(end - begin, size), r) for end, r in taken if end > begin]
            begin += size
    return divided


def _pour(amount: int, ranks: Ranks, loads: dict[int, int]) -> Ends:
    """Share an amount so that the least loaded ranks reach one level; return each rank's end."""
    low = sorted(ranks, key=loads.__getitem__)
    while (total := amount + sum(loads[r] for r in low)) < loads[low[-1]] * len(low):
        low.pop()
    ends, end = [], 0
    for rank, level in zip(low, even(total, len(low)), strict=True):
        end += level - loads[rank]
        loads[rank] = level
        ends.append((end, rank))
    return ends


def _row_of(box: Slice, dims: Sequence[int], most: float) -> int:
    """Return the size of the largest rows that have no more elements than `most`, or 1."""
    sizes = (prod(box.lengths[d] for d in dims[n:]) for n in range(1, len(dims) + 1))
    return next((size for size in sizes if size <= most), 1)


def _boxes(box: Slice, dims: Sequence[int], begin: int, end: int) -> Iterator[Slice]:
    """Cut out the elements from `begin` to `end`, counted along the last of `dims` first."""
    if end - begin == prod(box.lengths):
        yield box
        return
    dim, *inner = dims
    row = prod(box.lengths[d] for d in inner)
    while begin < end:
        first, within = divmod(begin, row)
        count = 0 if within else (end - begin) // row  # of whole rows; else a part of one
        size = count * row or min(end - begin, row - within)
        offsets, lengths = list(box.offsets), list(box.lengths)
        offsets[dim], lengths[dim] = offsets[dim] + first, count or 1
        rows = Slice(tuple(offsets), tuple(lengths), box.whole)
        yield from _boxes(rows, inner, within, within + size)
        begin += size
