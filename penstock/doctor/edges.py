"""Measure latency and bandwidth of every edge between processes, in both directions.

Messages go as in training, from a thread of the mesh, so that every wait has the mesh's deadline.
The source sends, the target answers with a byte.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from penstock.mesh import Mesh
from penstock.trace.units import rate_text, time_text

from .settings import Finding

_TAG = 1
"""Tag of all messages here."""
_PINGS = 20
"""Small messages that are timed."""
_LARGE_TIMES = 5
"""Large messages that are timed."""
_LARGE_BYTES = 1 << 20
"""Bytes of a large message."""
_SLOW_BYTES_PER_S = 100e6 / 8
"""Bandwidth below which an edge is slow."""
_OUTLIER = 3
"""Times the median edge's bandwidth over that of a slow one."""


@dataclass(frozen=True, slots=True)
class Edge:
    """The measured figures of one direction between two ranks.

    `latency_s` is half of a small message's round trip, `bytes_per_s` the bandwidth of a large
    one.
    """

    source: int
    target: int
    latency_s: float
    bytes_per_s: float


def pairs(world_size: int) -> list[tuple[int, int]]:
    """Return the (source, target) pairs to measure: neighbours and both ends, both ways."""
    edges = sorted({(a, a + 1) for a in range(world_size - 1)} | {(0, world_size - 1)})
    return [pair for a, b in edges for pair in ((a, b), (b, a))]


def measure_edges(mesh: Mesh) -> tuple[Edge, ...]:
    """Measure all pairs, one after the other; return the same on every rank."""
    mine: list[Edge] = []
    _ = mesh.point_to_point  # connects all processes, which must do so together
    for source, target in pairs(mesh.world_size):
        edge = f"rank {source} ──► rank {target}"
        mesh.world.barrier(f"for its turn, before {edge} is measured")
        if mesh.rank not in (source, target):
            continue
        peer = target if mesh.rank == source else source
        job = partial(_measure, mesh, peer, leads=mesh.rank == source)
        purpose = f"for messages of rank {peer}, while {edge} was measured"
        ran = mesh.background.controls.submit(job)
        small_s, large_s = mesh.background.wait(ran, purpose, peer)
        if mesh.rank == source:
            bytes_s = max(large_s - small_s, large_s / 10)
            mine.append(Edge(source, target, small_s / 2, _LARGE_BYTES / bytes_s))
    edges_of_ranks = mesh.world.gather(mine, "for what others measured")
    return tuple(edge for of_rank in edges_of_ranks for edge in of_rank)


def _measure(mesh: Mesh, peer: int, *, leads: bool) -> tuple[float, float]:
    """Exchange messages; return the median seconds of a small and of a large round trip."""
    small, large = (torch.zeros(n, dtype=torch.uint8) for n in (1, _LARGE_BYTES))
    _exchange(mesh, peer, small, leads=leads)  # the first one may have to connect
    pings_s = [_exchange(mesh, peer, small, leads=leads) for _ in range(_PINGS)]
    large_s = [_exchange(mesh, peer, large, leads=leads) for _ in range(_LARGE_TIMES)]
    return median(pings_s), median(large_s)


def _exchange(mesh: Mesh, peer: int, content: torch.Tensor, *, leads: bool) -> float:
    """Send a message and wait for the answer, or the reverse; return the seconds."""
    wires, began_s = mesh.point_to_point, time.perf_counter()
    first, second = (wires.send, wires.receive) if leads else (wires.receive, wires.send)
    for begin, message in ((first, content), (second, torch.zeros(1, dtype=torch.uint8))):
        wires.wait(begin(message, peer, _TAG), message, time.monotonic() + mesh.timeout_s)
    return time.perf_counter() - began_s


def check_edges(edges: Sequence[Edge]) -> Iterator[Finding]:
    """Warn of the slowest edge, if it is slow or much slower than the others."""
    slowest = min(edges, key=lambda edge: edge.bytes_per_s)
    typical = median(edge.bytes_per_s for edge in edges)
    if slowest.bytes_per_s < max(_SLOW_BYTES_PER_S, typical / _OUTLIER):
        took = time_text(_LARGE_BYTES / slowest.bytes_per_s)
        yield Finding(
            False,
            f"rank {slowest.source} ──► {slowest.target} carries "
            f"{bits_text(slowest.bytes_per_s)}, the median edge {bits_text(typical)}: 1 MiB takes "
            f"{took}, and a pipeline waits for its slowest edge. Use a "
            "faster network (GLOO_SOCKET_IFNAME chooses the interface), put these "
            "ranks on one host, or cut the model where little crosses",
        )


def bits_text(bytes_per_s: float) -> str:
    """Write a bandwidth in bits per second, as networks do."""
    return rate_text(bytes_per_s * 8, "bit")
