"""Measure this machine: its devices alone and all at once, and the links between them.

Nothing of it is measured with a pipeline: what a pipeline does is predicted from these figures.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from penstock.costs.cluster import Cluster, Host, Link
from penstock.costs.device import Device
from penstock.doctor.facts import memory_bytes, this_host

from .device import DeviceFacts, MeasuredDevice, measure_device
from .figures import Figure, MeasuredLink, Spread, rounded, seconds_of
from .links import measure_processes, measure_threads
from .work import USUAL, Run, Sizes, copy_work, gemm_work, mixed_work, shares_alone

_SMALL_BYTES = 64


def measure_gpus(devices: list[torch.device], num_bytes: int, budget_s: float) -> MeasuredLink:
    """Measure the first two devices, and all neighbours both ways at once."""
    pairs = [pair for a, b in pairwise(devices) for pair in ((a, b), (b, a))]
    part_s = budget_s / 4
    small_s = _copies_s(pairs[:1], _SMALL_BYTES, part_s)
    large_s = _copies_s(pairs[:1], num_bytes, part_s)
    crossing_s = _copies_s(pairs, num_bytes, part_s)
    begun_s = _copies_s(pairs[:1], _SMALL_BYTES, part_s, until_done=False)
    return MeasuredLink(num_bytes, small_s, large_s, crossing_s, begun_s, begun_s)


def _copies_s(
    pairs: list[tuple[torch.device, torch.device]],
    num_bytes: int,
    budget_s: float,
    *,
    until_done: bool = True,
) -> Spread:
    """Time copies that are begun together."""
    copies = [
        (torch.ones(num_bytes // 4, device=a), torch.empty(num_bytes // 4, device=b))
        for a, b in pairs
    ]
    streams = [torch.cuda.Stream(a) for a, _ in pairs]
    ends = {device for pair in pairs for device in pair}
    for device in ends:
        torch.cuda.synchronize(device)

    def run() -> None:
        for (source, target), stream in zip(copies, streams, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    def wait() -> None:
        for device in ends:
            torch.cuda.synchronize(device)

    found = seconds_of(run, budget_s, wait if until_done else lambda: None)
    wait()
    return found


BUDGET_S = 28.0
"""About how long measuring takes; starting two processes comes on top."""
_MESSAGE_BYTES = 1 << 20
_QUIET = 0.95
"""What is left to others on a machine that does nothing else."""
_UNSTEADY = 2.0
"""Quartiles of one figure that are so many times apart: repeats of it did not agree."""
_NAMED = 3
"""How many of them a warning names, the worst first."""
_OF_DEVICES, _OF_CROWDS, _OF_LINKS = 0.4, 0.4, 0.2
"""Shares of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured, and the cluster that is made of it.

    `had_core` is for which share of the time this process had a core while it measured one.
    """

    cluster: Cluster
    figures: tuple[Figure, ...]
    had_core: float = 1.0

    @property
    def warning(self) -> str:
        """What makes the figures doubtful; empty if nothing does."""
        found = []
        if self.had_core <= _QUIET:
            found.append(
                f"other programs ran: this one had a core for {self.had_core:.0%} of the time, so "
                "that the figures are too low"
            )
        unsteady = sorted(((f.spread.ratio, f.name) for f in self.figures), reverse=True)
        named = [f"{name} {ratio:.1f} times" for ratio, name in unsteady if ratio >= _UNSTEADY]
        if named:
            more = f" and {len(named) - _NAMED} more figures" if len(named) > _NAMED else ""
            found.append(
                "repeats of a figure did not agree, from the lower quartile to the upper: "
                f"{', '.join(named[:_NAMED])}{more}; these may be far off"
            )
        return f"{'; '.join(found)}; stop other programs and calibrate again" if found else ""


def calibrate(budget_s: float = BUDGET_S, sizes: Sizes = USUAL) -> Calibration:
    """Measure this machine for about so many seconds: its GPUs, or its cores if it has none.

    Raises:
        MeshError: processes of this host do not start, or do not reach each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _gpus(budget_s, sizes) if torch.cuda.is_available() else _cores(budget_s, sizes)
    finally:
        torch.set_num_threads(threads)


def _cores(budget_s: float, sizes: Sizes) -> Calibration:
    num_cores = _num_cores()
    cpu = torch.device("cpu")
    began_s, used_s = time.perf_counter(), time.thread_time()
    core = measure_device(
        cpu,
        DeviceFacts("core", memory_bytes() // num_cores, "cpu", _source(_cpu_name())),
        sizes,
        budget_s * _OF_DEVICES,
    )
    had_core = (time.thread_time() - used_s) / (time.perf_counter() - began_s)
    work: list[tuple[str, Callable[[], Run], int]] = [
        ("copies", lambda: copy_work(cpu, sizes.copy_bytes // 4).run, num_cores),
        ("products", lambda: gemm_work(cpu, sizes.gemm[0] // 2, torch.float32).run, num_cores),
        ("mixed work", partial(mixed_work, cpu, sizes), 2 * num_cores),
    ]
    part_s = budget_s * _OF_CROWDS / len(work)
    shares = {name: shares_alone(make, most, part_s) for name, make, most in work}
    part_s = budget_s * _OF_LINKS / 2
    measured = {
        "threads": measure_threads(_MESSAGE_BYTES, part_s),
        "processes": measure_processes(_MESSAGE_BYTES, part_s),
    }
    figures = [
        *core.figures,
        *(f for name, spreads in shares.items() for f in _crowd_figures(name, spreads)),
        *(figure for name, link in measured.items() for figure in link.figures(name)),
    ]
    host = Host(
        name=platform.node() or "host",
        devices=("core",) * num_cores,
        port="threads",
        processes="processes",
        memory_bytes=memory_bytes(),
        busy_speed=tuple(rounded(spread.middle) for spread in shares["mixed work"]),
    )
    cluster = _cluster(host, {"core": core.device}, _links(measured))
    return Calibration(cluster=cluster, figures=tuple(figures), had_core=had_core)


def _gpus(budget_s: float, sizes: Sizes) -> Calibration:
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", n) for n in range(count)]
    share_s = budget_s * (_OF_DEVICES + _OF_CROWDS) / count
    measured = [measure_device(each, _gpu_facts(each), sizes, share_s) for each in devices]
    links: dict[str, MeasuredLink] = {}
    if count > 1:
        links["peers"] = measure_gpus(devices, 64 * _MESSAGE_BYTES, budget_s * _OF_LINKS)
    kinds = [f"gpu{n}" for n in range(count)]
    host = Host(
        name=platform.node() or "host",
        devices=tuple(kinds),
        port="peers" if count > 1 else None,
        memory_bytes=memory_bytes(),
    )
    figures = [
        *(f for kind, each in zip(kinds, measured, strict=True) for f in _of_kind(kind, each)),
        *(figure for name, link in links.items() for figure in link.figures(name)),
    ]
    described = {kind: each.device for kind, each in zip(kinds, measured, strict=True)}
    return Calibration(cluster=_cluster(host, described, _links(links)), figures=tuple(figures))


def _num_cores() -> int:
    """Return how many cores this process may use: those it sees, or its container's quota."""
    host = this_host()
    return max(1, min(host.num_cores, int(host.quota_cores or host.num_cores)))


def _cluster(host: Host, devices: dict[str, Device], links: dict[str, Link]) -> Cluster:
    source = _source(platform.node() or "this machine")
    return Cluster(name=host.name, devices=devices, hosts=(host,), links=links, source=source)


def _links(measured: dict[str, MeasuredLink]) -> dict[str, Link]:
    return {name: link.link(_source(name)) for name, link in measured.items()}


def _gpu_facts(device: torch.device) -> DeviceFacts:
    gpu = torch.cuda.get_device_properties(device)
    return DeviceFacts(gpu.name, gpu.total_memory, "cuda", _source(gpu.name))


def _of_kind(kind: str, measured: MeasuredDevice) -> list[Figure]:
    return [Figure(f"{kind}: {f.name}", f.unit, f.spread) for f in measured.figures]


def _crowd_figures(name: str, shares: tuple[Spread, ...]) -> list[Figure]:
    return [
        Figure(f"{name}, {n} threads at once", "of one alone", spread)
        for n, spread in enumerate(shares, start=1)
        if n > 1
    ]


def _source(what: str) -> str:
    return f"{what}: measured by penstock doctor --calibrate, {date.today()}, torch {_torch()}"


def _torch() -> str:
    return str(torch.__version__)


def _cpu_name() -> str:
    """Return the name of the processor, as far as the system tells."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
