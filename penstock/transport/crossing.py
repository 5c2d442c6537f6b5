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


def shares(senders: Sequence[int], receivers: Sequence[int]) -> dict[tuple[int, int], Share]:
    """Return what each sender sends to each receiver that it sends anything; a receiver's shares
    are in the order of a message's bytes.
    """
    num_blocks = lcm(len(senders), len(receivers))
    whole = Slice.of_all((num_blocks,))
    plan = plan_resharding([(r, whole) for r in senders], [(r, whole) for r in receivers])
    found, hear = dict[tuple[int, int], Share](), set[int]()
    for sender, receiver, part in plan.crossing:
        (begin,), (length,) = part.offsets, part.lengths
        share = Share(begin, begin + length, num_blocks, receiver not in hear)
        found[sender, receiver] = share
        hear.add(receiver)
    return found


def _within(kinds: Iterable[TensorKind], span: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield which bytes, of tensors of which number, lie within a span of the message."""
    at, (begin, end) = 0, span
    for number, kind in enumerate(kinds):
        size = num_row_bytes(kind)
        first, last = max(begin - at, 0), min(end - at, size)
        if first < last:
            yield number, first, last
        at += size


def _size(kinds: Iterable[TensorKind]) -> int:
    return sum(map(num_row_bytes, kinds))


class _OutgoingShare(Outgoing):
    """The sending end of a link that carries a share of each message."""

    def __init__(self, mesh: Mesh, stage: int, rank: int, channel: int, share: Share) -> None:
        super().__init__(mesh, stage, rank, channel)
        self._share = share

    def _own(self, values: Values) -> Values:
        kinds = [kind for _, kind in values]
        within = _within(kinds, self._share.span(_size(kinds)))
        parts = [row_bytes(values[n][0])[first:last] for n, first, last in within]
        return [(part, TensorKind.of(part)) for part in parts]


def outgoing_shares(
    mesh: Mesh, stage: int, senders: Sequence[int], receivers: Sequence[int], channel: int
) -> list[Outgoing]:
    """Return the sending ends, of `stage`, to all receivers that this process sends anything."""
    return [
        _OutgoingShare(mesh, stage, receiver, channel, share)
        for (sender, receiver), share in shares(senders, receivers).items()
        if sender == mesh.rank
    ]


class _IncomingShare(Incoming):
    """The receiving end of such a link."""

    def __init__(self, mesh: Mesh, rank: int, channel: int, share: Share) -> None:
        super().__init__(mesh, rank, channel)
        self.share = share

    def _own(self, kinds: list[TensorKind]) -> list[TensorKind]:
        within = _within(kinds, self.share.span(_size(kinds)))
        return [_of_bytes(last - first) for _, first, last in within]


def _of_bytes(count: int) -> TensorKind:
    return TensorKind(torch.uint8, torch.Size((count,)), (1,), 0, Tensor)


class IncomingShares:
    """The receiving end, for one shard, of what `stage` sends; it is used as an `Incoming`.

    It hears from one sender or several; `payload` then gathers the message from all shards, which
    call it alike.
    """

    def __init__(
        self,
        mesh: Mesh,
        stage: int,
        senders: Sequence[int],
        receivers: Sequence[int],
        channel: int,
    ) -> None:
        self._mesh, self._links = mesh, list[_IncomingShare]()
        got: dict[int, list[Share]] = {rank: [] for rank in receivers}
        for (sender, receiver), share in shares(senders, receivers).items():
            got[receiver].append(share)
            if receiver == mesh.rank:
                self._links.append(_IncomingShare(mesh, sender, channel, share))
        self._of_shards = [
            Share(own[0].begin, own[-1].end, own[0].num_blocks)
            for own in map(got.__getitem__, mesh.shards.tensors.ranks if len(got) > 1 else got)
        ]
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
        size = _size(kinds)
        rooms = [room_for_rows(kind, self._mesh.device) for kind in kinds]
        for link, (_, parts) in zip(self._links, came, strict=True):
            _put(parts, kinds, link.share.span(size), rooms)
        if size >= _FEW_BYTES and len(self._of_shards) > 1:
            parts = [part for each in came for part in each.tensors]
            own = parts[0] if len(parts) == 1 else torch.cat(parts)
            spans = [share.span(size) for share in self._of_shards]
            shapes = [(end - begin,) for begin, end in spans]
            uneven = shapes if len(set(shapes)) > 1 else None
            rows = self._mesh.shards.tensors.all_gather(own, self._what, uneven)
            for shard, (span, row) in enumerate(zip(spans, rows, strict=True)):
                if shard != self._mesh.shard:
                    sizes = [last - first for _, first, last in _within(kinds, span)]
                    _put(row.split(sizes), kinds, span, rooms)
        filled = zip(rooms, kinds, strict=True)
        tensors = [fill_rows(tensor, received, kind) for (received, tensor), kind in filled]
        return self._links[0].payload(Came(header, tensors))


def _put(
    parts: Iterable[Tensor],
    kinds: Sequence[TensorKind],
    span: tuple[int, int],
    rooms: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """Put the parts of tensors that lie within a span where they belong."""
    for part, (number, first, last) in zip(parts, _within(kinds, span), strict=True):
        rooms[number][0][first:last] = part
