"""Messages between stages of several shards: each byte crosses once, and senders share the load.

All tensors of a message, one behind the other, are a row of bytes, alike on all shards of the
sender.  The plan (see `sharding.resharding`) divides it among the shards of both stages:

    shards of the sender    ├──────── 0 ────────┼──────── 1 ────────┤
    of the receiver         ├───── 0 ─────┼───── 1 ─────┼───── 2 ────┤
    links                   ├─── 0 to 0 ──┼─ 0-1 ─┼─ 1-1 ┼─ 1 to 2 ──┤

The receivers then gather the rest from each other, in the thread that runs their program, as all
collectives.  So few bytes that a message costs more than they do come whole from the first sender
that a shard hears, and the other ones say only that it was sent.

A tensor of which shards hold slices of samples is divided by itself, likewise; the slices of both
sides are even, so that each link has what its ends share of it, and nobody gathers.  Where both
sides have as many shards each sends its slice to the one of its number, and they may be uneven.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod

import torch
from torch import Tensor

from penstock.errors import PlanError
from penstock.mesh import Mesh
from penstock.sharding.layouts import Slice, samples
from penstock.sharding.resharding import plan_resharding

from .headers import Header, Payload, kinds_of, layouts_of
from .torch_distributed import Came, Incoming, Outgoing, Values
from .wire import TensorKind, fill_rows, num_row_bytes, room_for_rows, row_bytes

_FEW_BYTES = 1 << 16
"""They cross in less time than it takes to begin a collective."""
Sides = tuple[Sequence[int], Sequence[int]]
"""The ranks of the stage that sends, and of the one that receives."""
Part = tuple[int, int, int]
"""The number of a tensor, and which of its bytes: from the first up to the last."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of each message that goes one way: from one block to another, of equal ones.

    `has_few`: it is all of a message of few bytes, else nothing of it.
    """

    begin: int
    end: int
    num_blocks: int
    has_few: bool = True

    def span(self, num_bytes: int) -> tuple[int, int]:
        """Return where it begins and ends in a row of so many bytes."""
        return num_bytes * self.begin // self.num_blocks, num_bytes * self.end // self.num_blocks

    def of_whole(self, num_bytes: int) -> tuple[int, int]:
        """Return the same in what is held whole of a message."""
        few = 0, num_bytes * self.has_few
        return few if num_bytes < _FEW_BYTES else self.span(num_bytes)

    def parts(self, content: "_Content") -> Iterator[Part]:
        """Yield what it has of a message's tensors."""
        at, (begin, end) = 0, self.of_whole(content.num_whole)
        for number, (size, is_cut) in enumerate(zip(content.sizes, content.is_cut, strict=True)):
            first, last = max(begin - at, 0), min(end - at, size)
            if is_cut:
                first, last = (0, size) if content.is_like else self.span(size)
            else:
                at += size
            if first < last:
                yield number, first, last


@dataclass(frozen=True, slots=True)
class _Content:
    """The tensors of a message as all shards of its sender hold them together: their kinds, bytes,
    and whether each shard has a slice; between as many shards, that slice.
    """

    kinds: Sequence[TensorKind]
    sizes: Sequence[int]
    is_cut: Sequence[bool]
    is_like: bool

    @classmethod
    def of(cls, header: Header, *, is_like: bool) -> "_Content":
        kinds, layouts = kinds_of(header), layouts_of(header)
        if not is_like:
            pairs = zip(kinds, layouts, strict=True)
            kinds = [_with_samples(k, samples(own)) if own else k for k, own in pairs]
        is_cut = [layout is not None for layout in layouts]
        return cls(kinds, [*map(num_row_bytes, kinds)], is_cut, is_like)

    @property
    def num_whole(self) -> int:
        """The bytes of what each shard has all of."""
        return sum(n for n, is_cut in zip(self.sizes, self.is_cut, strict=True) if not is_cut)

    def begin(self, number: int, shard: int, count: int) -> int:
        """Return where a shard's own part of a tensor begins."""
        is_part = self.is_cut[number] and not self.is_like
        return self.sizes[number] * shard // count if is_part else 0

    def kinds_of_shard(self, count: int) -> list[TensorKind]:
        """Return the kinds of what one of so many shards holds."""
        if self.is_like:
            return [*self.kinds]
        pairs = zip(self.kinds, self.is_cut, strict=True)
        return [_with_samples(k, k.shape[0] // count) if is_cut else k for k, is_cut in pairs]


def _with_samples(kind: TensorKind, number: int) -> TensorKind:
    shape = torch.Size((number, *kind.shape[1:]))
    inner = prod(kind.shape[1:])  # as far apart as samples are that lie one behind the other
    if kind.strides[0] == inner:
        return kind._replace(shape=shape)
    strides = torch.empty(shape, device="meta").stride()
    return kind._replace(shape=shape, strides=strides)


def shares(sides: Sides) -> dict[tuple[int, int], Share]:
    """Return what each sender sends to each receiver that it sends anything; a receiver's shares
    are in the order of a message's bytes.
    """
    ranks = [*sides[0], *sides[1]]  # the plan orders by number: that of the shard, not the rank
    count, num_blocks = len(sides[0]), lcm(*map(len, sides))
    whole = [(number, Slice.of_all((num_blocks,))) for number in range(len(ranks))]
    found, hear = dict[tuple[int, int], Share](), set[int]()
    for sender, receiver, part in plan_resharding(whole[:count], whole[count:]).crossing:
        (begin,), (length,) = part.offsets, part.lengths
        few = receiver not in hear
        found[ranks[sender], ranks[receiver]] = Share(begin, begin + length, num_blocks, few)
        hear.add(receiver)
    return found


def _are_like(sides: Sides) -> bool:
    return len(sides[0]) == len(sides[1])


class _OutgoingShare(Outgoing):
    """The sending end of a link that carries a share of each message."""

    def __init__(
        self, mesh: Mesh, stage: int, rank: int, channel: int, share: Share, sides: Sides
    ) -> None:
        super().__init__(mesh, stage, rank, channel)
        self._share, self._place = share, (mesh.shard, len(sides[0]))
        self._is_like = _are_like(sides)

    def _own(self, tensors: Sequence[Tensor], header: Header) -> Values:
        content, found = _Content.of(header, is_like=self._is_like), []
        for number, first, last in self._share.parts(content):
            (shard, count), own = self._place, row_bytes(tensors[number])
            begin = content.begin(number, shard, count)
            even = content.begin(number, shard + 1, count) - begin  # 0 of what it has all of
            if even and len(own) != even:
                raise PlanError(
                    f"shard {shard} of {count} sends a slice of shape "
                    f"{tuple(tensors[number].shape)} to a stage of another mesh, and slices there "
                    "are even; make the micro-batches a multiple of both numbers of shards"
                )
            part = own[first - begin : last - begin]
            found.append((part, TensorKind.of(part)))
        return found


def outgoing_shares(mesh: Mesh, stage: int, sides: Sides, channel: int) -> list[Outgoing]:
    """Return the sending ends, of `stage`, to all receivers that this process sends anything."""
    return [
        _OutgoingShare(mesh, stage, receiver, channel, share, sides)
        for (sender, receiver), share in shares(sides).items()
        if sender == mesh.rank
    ]


class _IncomingShare(Incoming):
    """The receiving end of such a link."""

    def __init__(
        self, mesh: Mesh, rank: int, channel: int, share: Share, *, is_like: bool
    ) -> None:
        super().__init__(mesh, rank, channel)
        self.share, self._is_like = share, is_like

    def _own(self, header: Header) -> list[TensorKind]:
        parts = self.share.parts(_Content.of(header, is_like=self._is_like))
        shapes = [torch.Size((last - first,)) for _, first, last in parts]
        return [TensorKind(torch.uint8, shape, (1,), 0, Tensor) for shape in shapes]


class IncomingShares:
    """The receiving end of what `stage` sends, used as an `Incoming`; all shards call it alike."""

    def __init__(self, mesh: Mesh, stage: int, sides: Sides, channel: int) -> None:
        self._mesh, divided = mesh, shares(sides)
        self._is_like = is_like = _are_like(sides)
        self._links = [
            _IncomingShare(mesh, sender, channel, share, is_like=is_like)
            for (sender, receiver), share in divided.items()
            if receiver == mesh.rank
        ]
        count = len(sides[1])
        self._of_shards = [Share(n, n + 1, count) for n in range(count)]
        self._what = f"for the other shards to have their parts of what stage {stage} sent"

    @property
    def rank(self) -> int | None:
        """The sender, if it is only one."""
        return self._links[0].rank if len(self._links) == 1 else None

    @property
    def expects_much(self) -> bool:
        """As an `Incoming`."""
        return any(link.expects_much for link in self._links)

    def forget_lasting(self) -> None:
        """Begin a run, or end one, as the senders do."""
        for link in self._links:
            link.forget_lasting()

    def post(self) -> None:
        """Let the next message come in while others are computed on; `bring` is to follow."""
        for link in self._links:
            link.post()

    def bring(self, microbatch: int, timeout_s: float | None = None) -> list[Came]:
        """Wait for the own parts of the next message, as an `Incoming` does."""
        self.post()
        if timeout_s is None:
            return [link.bring(microbatch) for link in self._links]
        deadline = time.monotonic() + timeout_s
        return [link.bring(microbatch, deadline - time.monotonic()) for link in self._links]

    def payload(self, came: list[Came]) -> Payload:
        """Return the message, of which the own parts came; called in the order of messages.

        Raises:
            PeerError: another process failed, or is gone.
            WaitTimeout: the other shards do not come to it within the deadline.
        """
        header, place = came[0].header, (self._mesh.shard, len(self._of_shards))
        content = _Content.of(header, is_like=self._is_like)
        kinds = content.kinds_of_shard(place[1])
        rooms = [room_for_rows(kind, self._mesh.device) for kind in kinds]
        own: list[Tensor] = []
        for link, (_, contents) in zip(self._links, came, strict=True):
            parts = list(link.share.parts(content))
            for part, (number, first, last) in zip(contents, parts, strict=True):
                begin = content.begin(number, *place)
                rooms[number][0][first - begin : last - begin] = part
                own += [] if content.is_cut[number] else [part]
        if (size := content.num_whole) >= _FEW_BYTES and len(self._of_shards) > 1:
            for shard, row in enumerate(self._gathered(torch.cat(own), size)):
                if shard != self._mesh.shard:
                    every = self._of_shards[shard].parts(content)
                    parts = [part for part in every if not content.is_cut[part[0]]]
                    _put(row.split([last - first for _, first, last in parts]), parts, rooms)
        filled = zip(rooms, kinds, strict=True)
        tensors = [fill_rows(tensor, received, kind) for (received, tensor), kind in filled]
        return self._links[0].payload(Came(header, tensors))

    def _gathered(self, own: Tensor, size: int) -> list[Tensor]:
        """Return what has come to each shard, of so many bytes in all."""
        shapes = [(e - b,) for b, e in (share.of_whole(size) for share in self._of_shards)]
        uneven = shapes if len(set(shapes)) > 1 else None
        return self._mesh.shards.tensors.all_gather(own, self._what, uneven)


def _put(
    contents: Iterable[Tensor], parts: Iterable[Part], rooms: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Put the contents of parts where they belong."""
    for content, (number, first, last) in zip(contents, parts, strict=True):
        rooms[number][0][first:last] = content
