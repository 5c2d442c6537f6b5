"""Ways to bring a tensor from mesh to mesh, between processes that stand for hosts.

    host 0: devices 0 1 2 3 ┐            ┌ host 2: devices 8 9 10 11      a message for each two
    host 1: devices 4 5 6 7 ┴── gloo ────┴ host 3: devices 12 ... 15      hosts

Devices of a host copy in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from benchmarks.throughput.processes import Key, Part
from penstock.sharding.layouts import Slice

from .cases import Case, laid_out, pack, unpack
from .plan import Piece, Resharding, plan_resharding

CONTESTANTS = ("Penstock", "send/recv", "signal")


class Message(NamedTuple):
    """Parts that a device sends to devices of one host."""

    sender: int
    receivers: tuple[int, ...]
    parts: Sequence[Slice]


class Hosts:
    """The device of each process: a row of a mesh is a host."""

    def __init__(self, case: Case) -> None:
        self._first, self._sizes = prod(case.mesh), (case.mesh[-1], case.next_mesh[-1])
        self.num_senders = self._first // self._sizes[0]
        self.num_hosts = self.num_senders + prod(case.next_mesh) // self._sizes[1]

    def __getitem__(self, device: int) -> int:
        if device < self._first:
            return device // self._sizes[0]
        return self.num_senders + (device - self._first) // self._sizes[1]


def plan_of(name: str, case: Case) -> Resharding:
    """Plan what a contestant sends: ours; each receiver's whole slice from those that hold it; or
    a number from each host to each that ours sends anything.
    """
    held = laid_out(case.shape, case.mesh, case.before)
    wanted = laid_out(case.shape, case.next_mesh, case.after, first=len(held))
    ours = plan_resharding(held, wanted)
    if name == "Penstock":
        return ours
    if name == "send/recv":
        pieces = [p for own in wanted for p in plan_resharding(held, [own]).crossing]
        return Resharding(ours.held, ours.wanted, pieces, [])
    hosts, firsts = Hosts(case), dict[tuple[int, int], Piece]()
    for piece in ours.crossing:
        firsts.setdefault((hosts[piece.sender], hosts[piece.receiver]), piece)
    return Resharding(ours.held, ours.wanted, [*map(_one_number, firsts.values())], [])


def _one_number(piece: Piece) -> Piece:
    offsets, _, whole = piece.part
    return piece._replace(part=Slice(offsets, (1,) * len(whole), whole))


def crossing(plan: Resharding) -> Iterator[Message]:
    """Yield the messages between the meshes."""
    for sender in plan.held:
        for receiver, parts in plan.sends(sender).items():
            yield Message(sender, (receiver,), parts)


def spreading(plan: Resharding, hosts: Hosts) -> Iterator[Message]:
    """Yield those inside the mesh that receives: once to each host."""
    for group in plan.spreading:
        for sender, parts in group.items():
            of_host: dict[int, tuple[int, ...]] = {}
            for device in sorted(group.keys() - {sender}):
                of_host[hosts[device]] = (*of_host.get(hosts[device], ()), device)
            yield from (Message(sender, devices, parts) for devices in of_host.values())


class Process:
    """A process, which holds the devices of its host in one case at a time."""

    def __init__(self, rank: int, cases: Sequence[Case]) -> None:
        self._rank, self._cases = rank, cases
        self._sent = [0, 0]
        """Bytes to other processes: between the meshes, and inside the one that receives."""

    def begin(self, number: int) -> int:
        """Hold the slices of a case; return the bytes of its tensor."""
        case = self._cases[number]
        self._whole = torch.arange(prod(case.shape), dtype=torch.float32).reshape(case.shape)
        self._hosts, self._plans = Hosts(case), {n: plan_of(n, case) for n in CONTESTANTS}
        ours = self._plans["Penstock"]
        self._slices = {**ours.held, **ours.wanted}
        self._tensors = {
            device: self._whole[own.indices] * (device in ours.held)
            for device, own in self._slices.items()
            if self._hosts[device] == self._rank
        }
        return self._whole.nbytes

    def run(self, name: str) -> None:
        """Bring the tensor across."""
        plan = self._plans[name]
        self._sent = [
            self._exchange(crossing(plan)),
            self._exchange(spreading(plan, self._hosts)),
        ]

    def check(self, name: str) -> tuple[int, int]:
        """Bring it across once more, look at what came, and return the bytes sent."""
        wanted = self._tensors.keys() & self._plans[name].wanted.keys()
        for device in wanted:
            self._tensors[device].zero_()
        self.run(name)
        for device in wanted:
            assert torch.equal(self._tensors[device], self._whole[self._slices[device].indices]), (
                name
            )
        return self._sent[0], self._sent[1]

    def _exchange(self, messages: Iterable[Message]) -> int:
        """Send and receive; return the bytes sent to other processes."""
        out: dict[int, list[Message]] = {}
        come: dict[int, list[Message]] = {}
        for message in messages:
            ends = self._hosts[message.sender], self._hosts[message.receivers[0]]
            if ends[0] == self._rank:
                out.setdefault(ends[1], []).append(message)
            elif ends[1] == self._rank:
                come.setdefault(ends[0], []).append(message)
        local = out.pop(self._rank, [])
        rooms = {peer: torch.empty(sum(map(_size, own))) for peer, own in come.items()}
        works = [dist.irecv(room, peer) for peer, room in rooms.items()]
        packed = {peer: torch.cat([*map(self._packed, own)]) for peer, own in out.items()}
        works += [dist.isend(content, peer) for peer, content in packed.items()]
        for message in local:
            self._put(message, self._packed(message))
        for work in works:
            work.wait()  # type: ignore[union-attr]  # None is only for who is in no group
        for peer, own in come.items():
            for message, part in zip(own, rooms[peer].split([*map(_size, own)]), strict=True):
                self._put(message, part)
        return sum(content.nbytes for content in packed.values())

    def _packed(self, message: Message) -> Tensor:
        sender = message.sender
        return pack(message.parts, self._slices[sender], self._tensors[sender])

    def _put(self, message: Message, content: Tensor) -> None:
        for device in message.receivers:
            unpack(content, message.parts, self._slices[device], self._tensors[device])


def _size(message: Message) -> int:
    return sum(prod(part.lengths) for part in message.parts)


def prepare(rank: int, cases: Sequence[Case], _: tuple[int, ...]) -> dict[Key, Part]:
    """Join the others, and say what can be asked for."""
    dist.init_process_group("gloo")
    process, parts = Process(rank, cases), dict[Key, Part]()
    for number in range(len(cases)):
        parts["begin", number] = Part(partial(process.begin, number), {})
        for name in CONTESTANTS:
            parts[name, number] = Part(partial(process.run, name), {})
            parts[f"check {name}", number] = Part(partial(process.check, name), {})
    return parts
