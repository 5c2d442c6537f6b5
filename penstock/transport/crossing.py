"""Messages between stages of several shards: each byte crosses once, and senders share the load.

The tensors of a message, one behind the other, are a row of bytes, the same on all shards of the
sender.  The shards of each stage divide the row evenly:

    shards of the sender    ├──────── 0 ────────┼──────── 1 ────────┤
    of the receiver         ├───── 0 ─────┼───── 1 ─────┼───── 2 ────┤
    links                   ├─── 0 to 0 ──┼─ 0-1 ─┼─ 1-1 ┼─ 1 to 2 ──┤

The receivers then all-gather the row, in the thread that runs their program, as every collective.
A message of few bytes comes whole from each receiver's first sender; other links carry its header.

A tensor whose shards hold slices of samples is divided alone, in the same way.  Slices are even on
both sides, so each link has the bytes that both its ends hold, and no all-gather follows.  Between
equal numbers of shards, each sends its slice to the shard of its number; slices may be uneven.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm, prod

import torch
from torch import Tensor

from penstock.errors import PlanError
from penstock.mesh import Mesh
from penstock.sharding.layouts import FEW_BYTES as FEW_BYTES  # tests set it
from penstock.sharding.layouts import samples

from .headers import Header, Payload, kinds_of, layouts_of
from .torch_distributed import Incoming, Outgoing, Received, Values
from .wire import TensorKind, fill_rows, num_row_bytes, room_for_rows, row_bytes

Sides = tuple[Sequence[int], Sequence[int]]
"""The ranks of the sending stage, and of the receiving one."""
Part = tuple[int, int, int]
"""A tensor's number in a message, and a range of its bytes: the first, and one past the last."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of each message on one link: blocks `begin` to `end` of `num_blocks` equal ones.

    `has_few`: the link carries small messages whole; other links carry nothing of them.
    """

    begin: int
    end: int
    num_blocks: int
    has_few: bool = True

    def span(self, num_bytes: int) -> tuple[int, int]:
        """Return the begin and the end of the part in a row of `num_bytes`."""
        return num_bytes * self.begin // self.num_blocks, num_bytes * self.end // self.num_blocks

    def of_whole(self, num_bytes: int) -> tuple[int, int]:
        """Return the part of a row of tensors that each shard holds whole."""
        few = 0, num_bytes * self.has_few
        return few if num_bytes < FEW_BYTES else self.span(num_bytes)

    def parts(self, content: "_Content") -> Iterator[Part]:
        """Yield the parts of a message's tensors."""
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
    """The tensors of a message, as all shards of the sender hold them: their kinds and bytes.

    `is_cut`: each shard has a slice of the tensor.  With `is_like`, both sides have as many
    shards, and kinds are those of this shard's slice.
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
            kinds = [_with_samples(k, samples(cut)) if cut else k for k, cut in pairs]
        is_cut = [layout is not None for layout in layouts]
        return cls(kinds, [*map(num_row_bytes, kinds)], is_cut, is_like)

    @property
    def num_whole(self) -> int:
        """The bytes of the tensors that each shard holds whole."""
        return sum(n for n, is_cut in zip(self.sizes, self.is_cut, strict=True) if not is_cut)

    def begin(self, number: int, shard: int, count: int) -> int:
        """Return the first byte of a shard's slice of a tensor."""
        is_part = self.is_cut[number] and not self.is_like
        return self.sizes[number] * shard // count if is_part else 0

    def kinds_of_shard(self, count: int) -> list[TensorKind]:
        """Return the kinds of the tensors, or slices, of one of `count` shards."""
        if self.is_like:
            return [*self.kinds]
        pairs = zip(self.kinds, self.is_cut, strict=True)
        return [_with_samples(k, k.shape[0] // count) if is_cut else k for k, is_cut in pairs]


def _with_samples(kind: TensorKind, number: int) -> TensorKind:
    shape = torch.Size((number, *kind.shape[1:]))
    if kind.strides[0] == prod(kind.shape[1:]):  # samples lie one behind the other
        return kind._replace(shape=shape)
    return kind._replace(shape=shape, strides=torch.empty(shape, device="meta").stride())


def shares(sides: Sides) -> dict[tuple[int, int], Share]:
    """Return the share of each (sender, receiver); a receiver's are in the order of the bytes."""
    (senders, receivers), num_blocks = sides, lcm(*map(len, sides))
    sent, got = (num_blocks // len(side) for side in sides)  # blocks of each shard
    begins = sorted({*range(0, num_blocks, sent), *range(0, num_blocks, got)})
    return {
        (senders[begin // sent], receivers[begin // got]): Share(
            begin, end, num_blocks, has_few=begin % got == 0
        )
        for begin, end in pairwise((*begins, num_blocks))
    }


class _OutgoingShare(Outgoing):
    """The sending end of a link that carries a share of each message."""

    def __init__(
        self, mesh: Mesh, stage: int, rank: int, channel: int, share: Share, sides: Sides
    ) -> None:
        super().__init__(mesh, stage, rank, channel)
        self._share, self._place = share, (mesh.shard, len(sides[0]))
        self._is_like = len(sides[0]) == len(sides[1])

    def _own(self, tensors: Sequence[Tensor], header: Header) -> Values:
        content, values = _Content.of(header, is_like=self._is_like), []
        for number, first, last in self._share.parts(content):
            (shard, count), row = self._place, row_bytes(tensors[number])
            begin = content.begin(number, shard, count)
            even = content.begin(number, shard + 1, count) - begin  # 0 for a whole tensor
            if even and len(row) != even:
                raise PlanError(
                    f"shard {shard} of {count} sends a slice of shape "
                    f"{tuple(tensors[number].shape)} to a stage of another mesh, and slices there "
                    "are even; make the micro-batches a multiple of both numbers of shards"
                )
            part = row[first - begin : last - begin]
            values.append((part, TensorKind.of(part)))
        return values


def outgoing_shares(mesh: Mesh, stage: int, sides: Sides, channel: int) -> list[Outgoing]:
    """Return the sending ends, of `stage`, to all receivers with a share from this process."""
    return [
        _OutgoingShare(mesh, stage, receiver, channel, share, sides)
        for (sender, receiver), share in shares(sides).items()
        if sender == mesh.rank
    ]


class _IncomingShare(Incoming):
    """The receiving end of a link that carries a share of each message."""

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
    """The receiving end of an edge from `stage`, like an `Incoming`; all shards call it alike."""

    def __init__(self, mesh: Mesh, stage: int, sides: Sides, channel: int) -> None:
        self._mesh, divided = mesh, shares(sides)
        self._is_like = is_like = len(sides[0]) == len(sides[1])
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
        """The sender, if there is only one."""
        return self._links[0].rank if len(self._links) == 1 else None

    @property
    def expects_much(self) -> bool:
        """As of an `Incoming`."""
        return any(link.expects_much for link in self._links)

    def forget_lasting(self) -> None:
        """Begin or end a run, as the senders do."""
        for link in self._links:
            link.forget_lasting()

    def post(self) -> None:
        """Begin to receive the next message, beside computation; `bring` waits for it."""
        for link in self._links:
            link.post()

    def bring(self, microbatch: int, timeout_s: float | None = None) -> list[Received]:
        """Wait for this process's parts of the next message, as an `Incoming` does."""
        self.post()
        if timeout_s is None:
            return [link.bring(microbatch) for link in self._links]
        deadline = time.monotonic() + timeout_s
        return [link.bring(microbatch, deadline - time.monotonic()) for link in self._links]

    def payload(self, came: list[Received]) -> Payload:
        """Return the message whose parts came, in order, or raise PeerError or WaitTimeout."""
        header, place = came[0].header, (self._mesh.shard, len(self._of_shards))
        content = _Content.of(header, is_like=self._is_like)
        kinds = content.kinds_of_shard(place[1])
        rooms = [room_for_rows(kind, self._mesh.device) for kind in kinds]
        # 1. Copy this shard's parts.  `sent` are those of tensors that all shards hold whole.
        sent: list[Tensor] = []
        for link, (_, contents) in zip(self._links, came, strict=True):
            parts = list(link.share.parts(content))
            for part, (number, first, last) in zip(contents, parts, strict=True):
                begin = content.begin(number, *place)
                rooms[number][0][first - begin : last - begin] = part
                sent += [] if content.is_cut[number] else [part]
        # 2. Gather the other shards' parts of these: large tensors cross between stages once.
        rows: list[Tensor] = []
        if (size := content.num_whole) >= FEW_BYTES and len(self._of_shards) > 1:
            rows = self._gathered(torch.cat(sent), size)
        for shard, row in enumerate(rows):
            if shard == self._mesh.shard:
                continue
            of_shard = self._of_shards[shard].parts(content)
            parts = [part for part in of_shard if not content.is_cut[part[0]]]
            contents = list(row.split([last - first for _, first, last in parts]))
            for part, (number, first, last) in zip(contents, parts, strict=True):
                rooms[number][0][first:last] = part
        pairs = zip(rooms, kinds, strict=True)
        tensors = [fill_rows(tensor, received, kind) for (received, tensor), kind in pairs]
        return self._links[0].payload(Received(header, tensors))

    def _gathered(self, part: Tensor, size: int) -> list[Tensor]:
        """Return the bytes of each shard, of `size` in all."""
        shapes = [(e - b,) for b, e in (share.of_whole(size) for share in self._of_shards)]
        uneven = shapes if len(set(shapes)) > 1 else None
        return self._mesh.shards.tensors.all_gather(part, self._what, uneven)
