"""Find settings and links that make a job hang or slow; explain each in a line with its remedy.

`init_mesh` itself refuses wrong ranks, ports and versions, and names absent processes.

The latency and bandwidth of every edge between processes are measured in both directions.
Messages go as in training, from a thread of the mesh, so that every wait has the mesh's deadline.
The source sends, the target answers with a byte.
"""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from penstock.mesh import Mesh
from penstock.trace.units import rate_text, time_text

from .facts import RankFacts, quota_cores

Environment = Mapping[str, str]
"""Variables of the environment."""
Resolve = Callable[[str], Sequence[str]]
"""A function from a host's name to its addresses."""
_NVIDIA = Path("/proc/driver/nvidia/gpus")
"""A folder that exists if the driver sees GPUs."""


class Finding(NamedTuple):
    """One finding, as a line: an error if training could not work, else a warning."""

    is_error: bool
    text: str

    def __str__(self) -> str:
        return f"{'error' if self.is_error else 'warning'}: {self.text}"


def addresses_of(name: str) -> tuple[str, ...]:
    """Return the addresses of a host's name, in the order of their use."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in entries))


def check_network(
    environment: Environment, host: str, resolve: Resolve = addresses_of
) -> Iterator[Finding]:
    """Check that gloo and MASTER_ADDR reach other hosts, if the job has some."""
    # 1. The interface that gloo is told to use must be there.
    interfaces = [name for _, name in socket.if_nameindex()]
    wanted = environment.get("GLOO_SOCKET_IFNAME", "")
    absent = [name for name in wanted.split(",") if wanted and name not in interfaces]
    if absent:
        yield Finding(
            True,
            f"GLOO_SOCKET_IFNAME={wanted}: this machine has no network interface {absent[0]!r}. "
            f"Set it to one of {', '.join(interfaces)}, or unset it",
        )
    # torchrun tells if other processes of the job are on other hosts.
    here = environment.get("LOCAL_WORLD_SIZE", "")
    if not here.isdigit() or int(here) >= int(environment.get("WORLD_SIZE", "1")):
        return
    # 2. Across hosts, neither rank 0 nor gloo may be reached by a loopback address.
    address = environment.get("MASTER_ADDR", "")
    if _is_loopback(resolve(address)):
        yield Finding(
            True,
            f"MASTER_ADDR={address}: each host would look for rank 0 on itself. Give the address "
            "of the host of rank 0 as the others see it",
        )
    if not wanted and _is_loopback(local := resolve(host)):
        yield Finding(
            True,
            f"gloo on {host} would listen at {local[0]}: that is what the name of the machine "
            "stands for there, and the other hosts cannot reach it. Set GLOO_SOCKET_IFNAME to the "
            f"network interface between the hosts, one of {', '.join(interfaces)}, or correct "
            "the name's line in /etc/hosts",
        )


def _is_loopback(addresses: Sequence[str]) -> bool:
    return bool(addresses) and all(a.startswith("127.") or a == "::1" for a in addresses)


def check_together(
    ranks: Sequence[RankFacts], quota: float | None = None, nvidia: Path = _NVIDIA
) -> Iterator[Finding]:
    """Check that the cores suffice for the threads of all processes, and that torch sees the GPUs.

    `quota` is the container's limit of CPU time, in cores; default: the system's.
    """
    # 1. Processes on the same cores of a machine share them.
    quota = quota_cores() if quota is None else quota
    sharing: dict[tuple[str, tuple[int, ...]], list[RankFacts]] = defaultdict(list)
    for facts in ranks:
        sharing[facts.machine, facts.cores].append(facts)
    for (_, cores), here in sharing.items():
        threads, is_local = sum(facts.num_threads for facts in here), ranks[0] in here
        num_cores = min(len(cores), quota if quota is not None and is_local else len(cores))
        if threads > num_cores:
            fitting = int(num_cores) // len(here)
            names = ", ".join(str(facts.rank) for facts in here)
            yield Finding(
                False,
                f"rank{'s' if len(here) > 1 else ''} {names} on {here[0].host} run {threads} "
                f"threads on {num_cores:g} cores, and slow each other. "
                + (
                    f"Set OMP_NUM_THREADS={fitting}"
                    if fitting
                    else f"Start at most {max(1, int(num_cores))} processes on this host"
                ),
            )
    # 2. A machine with GPUs that torch does not see has the wrong build of torch.
    is_hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    if nvidia.is_dir() and not ranks[0].gpus and not is_hidden:
        yield Finding(
            False,
            f"this machine has NVIDIA GPUs that torch {ranks[0].torch}, built for "
            f"{ranks[0].torch_build}, does not see. Install a build that fits the driver",
        )


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
