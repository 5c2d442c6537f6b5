"""How fast messages travel: every edge measured by itself, in both directions.

Each message goes as those of training do, and from a thread of the mesh, so that every wait has
the mesh's deadline.

    source                      target
    a number: 0, ping       ──►
                            ◄── a number: 0
    a number: bytes to come ──►
    that many bytes         ──►
                            ◄── a number: 0
    a number: -1, the end   ──►
"""

import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from penstock.mesh import Mesh
from penstock.mesh.plain_data import Codec, record
from penstock.mesh.point_to_point import PointToPoint
from penstock.trace.units import time_text

from .finding import Finding, warning

ALL_PAIRS_UP_TO = 8
"""Beyond so many ranks, only neighbours and the closing pair of the ring are measured."""
_NUMBER = struct.Struct("!q")
_TAG = 1
_PINGS, _PINGS_S = 20, 0.3
_SIZES = tuple(4**n * 64 * 1024 for n in range(4))
"""Bytes of the large messages: tried in turn until one takes long."""
_LARGE_S, _LARGE_TIMES, _ALL_LARGE_S = 0.1, 5, 0.5
_LEAST_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Edge:
    """What one direction between two ranks gave.

    `latency_s` is half of a small message's way there and back, `bytes_per_s` that of a message of
    `num_bytes`.
    """

    source: int
    target: int
    latency_s: float
    bytes_per_s: float
    num_bytes: int


def pairs(world_size: int) -> list[tuple[int, int]]:
    """Return the (source, target) to measure, both ways: all, or neighbours and both ends."""
    if world_size <= ALL_PAIRS_UP_TO:
        ways = [(a, b) for a in range(world_size) for b in range(a + 1, world_size)]
    else:
        ways = [*((a, a + 1) for a in range(world_size - 1)), (world_size - 1, 0)]
    return [pair for a, b in ways for pair in ((a, b), (b, a))]


def measure_edges(mesh: Mesh) -> tuple[Edge, ...]:
    """Measure all pairs, one after the other; gives the same on every rank.

    Raises:
        PeerError: another process failed, or is gone.
        WaitTimeout: a message did not arrive within the mesh's deadline.
    """
    mine = []
    wires = mesh.point_to_point  # all connect, together, also those that only wait for their turn
    for source, target in pairs(mesh.world_size):
        edge = f"rank {source} ──► rank {target}"
        mesh.world.barrier(f"for its turn, before {edge} is measured")
        if mesh.rank not in (source, target):
            continue
        peer = target if mesh.rank == source else source
        job = partial(_lead if mesh.rank == source else _follow, _Line(wires, mesh, peer))
        what = f"for messages of rank {peer}, while {edge} was measured"
        found = mesh.background.wait(mesh.background.controls.submit(job), what, peer)
        mine += [found] if found is not None else []
    everyone = mesh.world.gather(mine, "for what others measured", Codec([record(Edge)]))
    return tuple(sorted((e for of_rank in everyone for e in of_rank), key=_by_ends))


class _Line:
    """Both directions to one peer, as messages of training go."""

    def __init__(self, wires: PointToPoint, mesh: Mesh, peer: int) -> None:
        self._wires, self._timeout_s = wires, mesh.timeout_s
        self.rank, self.peer = mesh.rank, peer

    def send(self, message: bytes) -> None:
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self._wait(self._wires.send(content, self.peer, _TAG), content)

    def receive(self, room: bytearray) -> bytearray:
        content = torch.frombuffer(room, dtype=torch.uint8)
        self._wait(self._wires.receive(content, self.peer, _TAG), content)
        return room

    def _wait(self, work: Any, content: torch.Tensor) -> None:
        self._wires.wait(work, content, time.monotonic() + self._timeout_s)


def _lead(line: _Line) -> Edge:
    """Do the source's part, and measure."""
    pings = list(_pings(line))
    latency_s = median(pings) / 2
    times_s: list[float] = []
    num_bytes = 0
    began = time.perf_counter()
    for num_bytes in _SIZES:
        times_s = [_exchange(line, bytes(num_bytes))]
        if times_s[0] > _LARGE_S:
            break
    payload = bytes(num_bytes)
    while len(times_s) < _LARGE_TIMES and time.perf_counter() - began < _ALL_LARGE_S:
        times_s.append(_exchange(line, payload))
    line.send(_NUMBER.pack(-1))
    took_s = median(times_s)
    on_the_way_s = max(took_s - 2 * latency_s, took_s / 10)
    return Edge(line.rank, line.peer, latency_s, num_bytes / on_the_way_s, num_bytes)


def _pings(line: _Line) -> Iterator[float]:
    """Send small messages; yields the seconds there and back."""
    nothing = b""
    _exchange(line, nothing)  # the first one may have to connect
    began = time.perf_counter()
    for count in range(_PINGS):
        if count and time.perf_counter() - began > _PINGS_S:
            return
        yield _exchange(line, nothing)


def _exchange(line: _Line, payload: bytes) -> float:
    """Send a message and wait for the answer; return the seconds."""
    began = time.perf_counter()
    line.send(_NUMBER.pack(len(payload)))
    if payload:
        line.send(payload)
    line.receive(bytearray(_NUMBER.size))
    return time.perf_counter() - began


def _follow(line: _Line) -> None:
    """Do the target's part."""
    while (num_bytes := _NUMBER.unpack(line.receive(bytearray(_NUMBER.size)))[0]) >= 0:
        if num_bytes:
            line.receive(bytearray(num_bytes))
        line.send(_NUMBER.pack(0))


def _by_ends(edge: Edge) -> tuple[int, int]:
    return edge.source, edge.target


_SLOW_BYTES_PER_S, _FAR_S = 100e6 / 8, 5e-3
_OUTLIER = 3
"""An edge that has less than this fraction of the median bandwidth stands out."""
_MESSAGE_BYTES = 2**20
_NAMED = 3
"""So many edges are named; the others are counted."""


def check_edges(edges: Sequence[Edge]) -> Iterator[Finding]:
    """Name edges that are slow, slower than the others, or far."""
    typical = median(edge.bytes_per_s for edge in edges)
    slow = [e for e in edges if e.bytes_per_s < _SLOW_BYTES_PER_S]
    if slow:
        least = min(edge.bytes_per_s for edge in slow)
        yield warning(
            f"{_named(slow)} less than {rate_text(_SLOW_BYTES_PER_S)} ({rate_text(least)})",
            f"a message of 1 MiB takes up to {time_text(_MESSAGE_BYTES / least)}",
            "Use a faster network (GLOO_SOCKET_IFNAME chooses the interface), or cut the model "
            "where little crosses",
        )
    uneven = [e for e in edges if e.bytes_per_s * _OUTLIER < typical and e not in slow]
    if uneven:
        least = min(edge.bytes_per_s for edge in uneven)
        yield warning(
            f"{_named(uneven)} less than a third of the median edge's {rate_text(typical)} "
            f"({rate_text(least)})",
            "a pipeline waits for its slowest edge",
            "See what lies between these hosts, or put neighbouring ranks on one host",
        )
    far = [e for e in edges if e.latency_s > _FAR_S]
    if far:
        most = max(edge.latency_s for edge in far)
        yield warning(
            f"{_named(far)} messages with a latency of up to {time_text(most)}",
            "each micro-batch waits that long there",
            "Use hosts that are closer to each other, or fewer and larger micro-batches",
        )


def _named(edges: Sequence[Edge]) -> str:
    """Begin a sentence about edges: "rank 0 ──► 1 and 3 more carry"."""
    names = [f"{edge.source} ──► {edge.target}" for edge in edges[:_NAMED]]
    more = [f"{len(edges) - _NAMED} more"] if len(edges) > _NAMED else []
    listed = [*names, *more]
    text = listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
    return f"rank {text} {'carries' if len(edges) == 1 else 'carry'}"


def rate_text(bytes_per_s: float) -> str:
    """Write a bandwidth as networks are sold: in bits a second, with three digits."""
    rate = bytes_per_s * 8 / 1e6
    return f"{rate / 1e3:.3g} Gbit/s" if rate >= 999.5 else f"{rate:.3g} Mbit/s"
