"""Measure this machine: its devices alone and all at once, and the links between them.

Nothing of it is measured with a pipeline: what a pipeline does is predicted from these figures.
"""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.costs.cluster import Cluster, Device, Host
from penstock.doctor.facts import memory_bytes, quota_cores
from penstock.planner.shared_cores import num_cores

from .figures import Figure, Spread, rounded, seconds_of
from .links import MeasuredLink, measure_gpus, measure_processes, measure_threads
from .work import (
    CHAIN,
    LARGE,
    USUAL,
    Sizes,
    copy_work,
    gemm_work,
    issue_work,
    mixed_work,
    share_at,
    shares_alone,
)

BUDGET_S = 16.0
"""About how long measuring takes; starting two processes comes on top."""
_OF_DEVICES, _OF_CROWDS, _OF_LINKS = 0.25, 0.5, 0.25
"""Shares of the budget."""
_MESSAGE_BYTES = 1 << 20
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TOO_SLOW, _TRIED = 10, 192
"""A dtype that is so many times slower on a core than float32, for such a product, is left out."""
_QUIET = 0.95
"""What is left to others on a machine that does nothing else."""
_UNSTEADY = 2.0
"""Quartiles of one figure that are so many times apart: repeats of it did not agree."""
_NAMED = 3
"""How many of them a warning names, the worst first."""


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


def calibrate(budget_s: float = BUDGET_S, sizes: Sizes | None = None) -> Calibration:
    """Measure this machine for about so many seconds: its GPUs, or its cores if it has none.

    Raises:
        MeshError: processes of this host do not start, or do not reach each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if torch.cuda.is_available():
            return _gpus(budget_s, sizes or LARGE)
        return _cores(budget_s, sizes or USUAL)
    finally:
        torch.set_num_threads(threads)


def _cores(budget_s: float, sizes: Sizes) -> Calibration:
    count = max(1, min(num_cores(), int(quota_cores() or num_cores())))
    cpu = torch.device("cpu")
    facts = DeviceFacts("core", memory_bytes() // count, _source(_cpu_name()))
    began_s, used_s = time.perf_counter(), time.thread_time()
    core, figures = measure_device(cpu, facts, sizes, budget_s * _OF_DEVICES)
    had_core = (time.thread_time() - used_s) / (time.perf_counter() - began_s)
    mixed = shares_alone(partial(mixed_work, sizes), count, budget_s * _OF_CROWDS)
    part_s = budget_s * _OF_LINKS / 2
    links = {
        "threads": measure_threads(_MESSAGE_BYTES, part_s),
        "processes": measure_processes(_MESSAGE_BYTES, part_s),
    }
    described = Host(
        name=platform.node() or "host",
        devices=("core",) * count,
        port="threads",
        processes="processes",
        memory_bytes=memory_bytes(),
        busy_speed=_for_each(mixed, count),
    )
    figures += _crowd_figures("mixed work", mixed)
    return _calibration(described, {"core": core}, links, figures, had_core)


def _gpus(budget_s: float, sizes: Sizes) -> Calibration:
    gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    devices: dict[str, Device] = {}
    figures: list[Figure] = []
    for n, gpu in enumerate(gpus):
        known = torch.cuda.get_device_properties(gpu)
        facts = DeviceFacts(known.name, known.total_memory, _source(known.name))
        kind, share_s = f"gpu{n}", budget_s * _OF_DEVICES / len(gpus)
        devices[kind], found = measure_device(gpu, facts, sizes, share_s)
        figures += [Figure(f"{kind}: {f.name}", f.unit, f.spread) for f in found]
    links: dict[str, MeasuredLink] = {}
    if len(gpus) > 1:
        links["peers"] = measure_gpus(gpus[0], gpus[1], budget_s * _OF_LINKS)
    host = Host(
        name=platform.node() or "host",
        devices=tuple(devices),
        port="peers" if links else None,
        memory_bytes=memory_bytes(),
    )
    return _calibration(host, devices, links, figures)


class DeviceFacts(NamedTuple):
    """What is read, not measured."""

    name: str
    memory_bytes: int
    source: str


def measure_device(
    device: torch.device, facts: DeviceFacts, sizes: Sizes, budget_s: float
) -> tuple[Device, list[Figure]]:
    """Measure a device alone: what it copies, the peak of each dtype, what issuing takes."""
    is_cpu = device.type == "cpu"

    def wait() -> None:
        if not is_cpu:
            torch.cuda.synchronize(device)

    part_s = budget_s / 4
    copy = seconds_of(copy_work(device, sizes.copy_bytes), part_s, wait).per(sizes.copy_bytes)
    figures = [Figure("copy", "B/s", copy)]
    peaks: dict[str, float] = {}
    for name, dtype in _DTYPES.items():
        if peaks and is_cpu:
            tried = seconds_of(gemm_work(device, _TRIED, dtype), 0.0, wait).per(2 * _TRIED**3)
            if tried.middle < peaks["float32"] / _TOO_SLOW:
                continue
        product = seconds_of(gemm_work(device, sizes.gemm, dtype), part_s, wait)
        figures.append(Figure(f"product {name}", "FLOP/s", product.per(2 * sizes.gemm**3)))
        peaks[name] = rounded(figures[-1].spread.middle)
    issue = seconds_of(issue_work(device), part_s).times(1 / (2 * CHAIN))
    wait()
    figures.append(Figure("an operator is issued", "s", issue))
    described = Device(
        name=facts.name,
        flops_per_s=peaks,
        bytes_per_s=rounded(copy.middle),
        memory_bytes=facts.memory_bytes,
        torch_type=device.type,
        efficiency={"gemm": 1.0},  # the peak is what a product reached
        source=facts.source,
        issue_s=rounded(issue.middle),
        gap_s=rounded(issue.middle) if is_cpu else 0.0,  # a core issues what it computes
    )
    return described, figures


def _calibration(
    host: Host,
    devices: Mapping[str, Device],
    links: Mapping[str, MeasuredLink],
    figures: Sequence[Figure],
    had_core: float = 1.0,
) -> Calibration:
    cluster = Cluster(
        name=host.name,
        devices=devices,
        hosts=(host,),
        links={name: link.link(_source(name)) for name, link in links.items()},
        source=_source(host.name),
    )
    of_links = (figure for name, link in links.items() for figure in link.figures(name))
    return Calibration(cluster=cluster, figures=(*figures, *of_links), had_core=had_core)


def _crowd_figures(name: str, shares: Mapping[int, Spread]) -> list[Figure]:
    return [
        Figure(f"{name}, {n} threads at once", "of one alone", spread)
        for n, spread in shares.items()
        if n > 1
    ]


def _for_each(shares: Mapping[int, Spread], most: int) -> tuple[float, ...]:
    """Return the share of each of 1, 2, 3, ... threads."""
    return tuple(rounded(share_at(shares, n)) for n in range(1, most + 1))


def _source(what: str) -> str:
    measured = f"measured by penstock doctor --calibrate, {date.today()}"
    return f"{what}: {measured}, torch {torch.__version__}"


def _cpu_name() -> str:
    """Return the name of the processor, as far as the system tells."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
