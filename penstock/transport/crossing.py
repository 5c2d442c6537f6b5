"""Messages between stages of unlike meshes: each byte crosses once, and senders share the load.

All tensors of a message, one behind the other, are a row of bytes, alike on all shards of the
sender.  The plan (see `sharding.resharding`) divides it among the shards of both stages:

    shards of the sender    ├──────── 0 ────────┼──────── 1 ────────┤
    of the receiver         ├───── 0 ─────┼───── 1 ─────┼───── 2 ────┤
    links                   ├─── 0 to 0 ──┼─ 0-1 ─┼─ 1-1 ┼─ 1 to 2 ──┤

The receivers then gather the rest from each other, in the thread that runs their program, as all
collectives.  So few bytes that a message costs more than they do come whole from the first sender
that a shard hears, and the other ones say only that it was sent.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from penstock.mesh import Mesh
from penstock.sharding.resharding import plan_resharding
from penstock.sharding.slices import Slice

from .headers import Payload, kinds_of
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
        """Return where it begins and ends in a message of so many bytes."""
        if num_bytes < _FEW_BYTES:
            return 0, num_bytes * self.has_few
        return num_bytes * self.begin // self.num_blocks, num_bytes * self.end // self.num_blocks

    def parts(self, kinds: Sequence[TensorKind]) -> Iterator[Part]:
        """Yield what it has of a message's tensors."""
        at, (begin, end) = 0, self.span(_size(kinds))
        for number, kind in enumerate(kinds):
            size = num_row_bytes(kind)
            first, last = max(begin - at, 0), min(end - at, size)
            if first < last:
                yield number, first, last
            at += size


def _size(kinds: Iterable[TensorKind]) -> int:
    return sum(map(num_row_bytes, kinds))


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


class _OutgoingShare(Outgoing):
    """The sending end of a link that carries a share of each message."""

    def __init__(self, mesh: Mesh, stage: int, rank: int, channel: int, share: Share) -> None:
        super().__init__(mesh, stage, rank, channel)
        self._share = share

    def _own(self, values: Values) -> Values:
        parts = self._share.parts([kind for _, kind in values])
        contents = [row_bytes(values[n][0])[first:last] for n, first, last in parts]
        return [(content, TensorKind.of(content)) for content in contents]


def outgoing_shares(mesh: Mesh, stage: int, sides: Sides, channel: int) -> list[Outgoing]:
    """Return the sending ends, of `stage`, to all receivers that this process sends anything."""
    return [
        _OutgoingShare(mesh, stage, receiver, channel, share)
        for (sender, receiver), share in shares(sides).items()
        if sender == mesh.rank
    ]


class _IncomingShare(Incoming):
    """The receiving end of such a link."""

    def __init__(self, mesh: Mesh, rank: int, channel: int, share: Share) -> None:
        super().__init__(mesh, rank, channel)
        self.share = share

    def _own(self, kinds: list[TensorKind]) -> list[TensorKind]:
        parts = self.share.parts(kinds)
        shapes = [torch.Size((last - first,)) for _, first, last in parts]
        return [TensorKind(torch.uint8, shape, (1,), 0, Tensor) for shape in shapes]


class IncomingShares:
    """The receiving end of what `stage` sends, used as an `Incoming`; all shards call it alike."""

    def __init__(self, mesh: Mesh, stage: int, sides: Sides, channel: int) -> None:
        self._mesh, divided = mesh, shares(sides)
        self._links = [
            _IncomingShare(mesh, sender, channel, share)
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
        header = came[0].header
        kinds = kinds_of(header)
        rooms = [room_for_rows(kind, self._mesh.device) for kind in kinds]
        for link, (_, contents) in zip(self._links, came, strict=True):
            _put(contents, link.share.parts(kinds), rooms)
        if (size := _size(kinds)) >= _FEW_BYTES and len(self._of_shards) > 1:
            own = torch.cat([content for _, contents in came for content in contents])
            for shard, row in enumerate(self._gathered(own, size)):
                if shard != self._mesh.shard:
                    parts = list(self._of_shards[shard].parts(kinds))
                    _put(row.split([last - first for _, first, last in parts]), parts, rooms)
        filled = zip(rooms, kinds, strict=True)
        tensors = [fill_rows(tensor, received, kind) for (received, tensor), kind in filled]
        return self._links[0].payload(Came(header, tensors))

    def _gathered(self, own: Tensor, size: int) -> list[Tensor]:
        """Return what has come to each shard, of so many bytes in all."""
        shapes = [(e - b,) for b, e in (share.span(size) for share in self._of_shards)]
        uneven = shapes if len(set(shapes)) > 1 else None
        return self._mesh.shards.tensors.all_gather(own, self._what, uneven)


def _put(
    contents: Iterable[Tensor], parts: Iterable[Part], rooms: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Put the contents of parts where they belong."""
    for content, (number, first, last) in zip(contents, parts, strict=True):
        rooms[number][0][first:last] = content
