"""Measure this machine: its devices alone and all at once, and the links between them.

No pipeline runs here: Penstock predicts a pipeline from these figures.
"""

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import NamedTuple

import torch

from penstock.costs.cluster import Cluster, Device, Host
from penstock.doctor.facts import memory_bytes, processor_name, quota_cores
from penstock.planner.shared_cores import num_cores

from .figures import (
    CHAIN,
    LARGE,
    USUAL,
    Figure,
    Sizes,
    copy_work,
    gemm_work,
    issue_work,
    mixed_work,
    rounded,
    seconds_of,
    share_at,
    shares_alone,
)
from .links import MeasuredLink, measure_gpus, measure_processes, measure_threads

BUDGET_S = 16.0
"""Seconds that measuring takes, about, without the start of two processes."""
_OF_DEVICES = 0.25
"""Share of the budget for devices alone."""
_OF_CROWDS = 0.5
"""Share for several threads at once."""
_OF_LINKS = 0.25
"""Share for links."""
_MESSAGE_BYTES = 1 << 20
"""Bytes of a large message."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types of matrix products."""
_TOO_SLOW = 10
"""Times a core's float32 product over that of a type that is left out."""
_TRIED = 192
"""Rows of that product."""
_QUIET = 0.95
"""Share of the time that a process has a core on an idle machine, at least."""
_UNSTEADY, _USELESS = 2.0, 5.0
"""Ratio of the quartiles of a figure from which its repeats disagree, and from which it may be
several times off, so that later jobs measure again.
"""
_NAMED = 3
"""Disagreeing figures that a warning names, the worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The measured figures, and the cluster described by them.

    `had_core` is the share of the time in which this process had a core while it measured one.
    """

    cluster: Cluster
    figures: tuple[Figure, ...]
    had_core: float = 1.0

    @property
    def was_busy(self) -> bool:
        """True if other programs took this process's core."""
        return self.had_core <= _QUIET

    @property
    def is_worth_keeping(self) -> bool:
        """True if later jobs may plan by the figures."""
        return not self.was_busy and all(f.spread.ratio < _USELESS for f in self.figures)

    @property
    def warning(self) -> str:
        """The reasons to doubt the figures; empty without any."""
        reasons = []
        if self.was_busy:
            reasons.append(
                f"other programs ran: this one had a core for {self.had_core:.0%} of the time, so "
                "that the figures are too low"
            )
        unsteady = sorted(((f.spread.ratio, f.name) for f in self.figures), reverse=True)
        named = [f"{name} {ratio:.1f} times" for ratio, name in unsteady if ratio >= _UNSTEADY]
        if named:
            more = f" and {len(named) - _NAMED} more figures" if len(named) > _NAMED else ""
            reasons.append(
                "repeats of a figure did not agree, from the lower quartile to the upper: "
                f"{', '.join(named[:_NAMED])}{more}; these may be far off"
            )
        return f"{'; '.join(reasons)}; stop other programs and calibrate again" if reasons else ""


def calibrate(budget_s: float = BUDGET_S, sizes: Sizes | None = None) -> Calibration:
    """Measure this machine for about `budget_s` seconds: its GPUs, or its cores if it has none.  A
    MeshError says that processes of this host do not start, or do not reach each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if torch.cuda.is_available():
            return _gpus(budget_s, sizes or LARGE)
        return _cores(budget_s, sizes or USUAL)
    finally:
        torch.set_num_threads(threads)


def num_usable_cores() -> int:
    """Return the number of cores; a container may have fewer than the machine."""
    return max(1, min(num_cores(), int(quota_cores() or num_cores())))


def _cores(budget_s: float, sizes: Sizes) -> Calibration:
    count, cpu = num_usable_cores(), torch.device("cpu")
    source = _source(processor_name() or platform.machine())
    facts = DeviceFacts("core", memory_bytes() // count, source)
    # One core alone, then all at once, then messages between threads and between processes.
    began_s, used_s = time.perf_counter(), time.thread_time()
    core, figures = measure_device(cpu, facts, sizes, budget_s * _OF_DEVICES)
    had_core = (time.thread_time() - used_s) / (time.perf_counter() - began_s)
    mixed = shares_alone(partial(mixed_work, sizes), count, budget_s * _OF_CROWDS)
    part_s = budget_s * _OF_LINKS / 2
    links = {
        "threads": measure_threads(_MESSAGE_BYTES, part_s),
        "processes": measure_processes(_MESSAGE_BYTES, part_s),
    }
    # Describe the machine by the figures.
    described = Host(
        name=platform.node() or "host",
        devices=("core",) * count,
        port="threads",
        processes="processes",
        memory_bytes=memory_bytes(),
        busy_speed=tuple(rounded(share_at(mixed, n)) for n in range(1, count + 1)),
    )
    figures += [
        Figure(f"mixed work, {n} threads at once", "of one alone", spread)
        for n, spread in mixed.items()
        if n > 1
    ]
    return _calibration(described, {"core": core}, links, figures, had_core)


def _gpus(budget_s: float, sizes: Sizes) -> Calibration:
    gpus = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    devices: dict[str, Device] = {}
    figures: list[Figure] = []
    for n, gpu in enumerate(gpus):
        known = torch.cuda.get_device_properties(gpu)
        facts = DeviceFacts(known.name, known.total_memory, _source(known.name))
        kind, share_s = f"gpu{n}", budget_s * _OF_DEVICES / len(gpus)
        devices[kind], of_gpu = measure_device(gpu, facts, sizes, share_s)
        figures += [Figure(f"{kind}: {f.name}", f.unit, f.spread) for f in of_gpu]
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
    """Facts of a device that are read, not measured."""

    name: str
    memory_bytes: int
    source: str


def measure_device(
    device: torch.device, facts: DeviceFacts, sizes: Sizes, budget_s: float
) -> tuple[Device, list[Figure]]:
    """Measure a device alone: bandwidth of a copy, peak of each dtype, issue of an operator."""
    is_cpu = device.type == "cpu"

    def wait() -> None:
        if not is_cpu:
            torch.cuda.synchronize(device)

    # A copy, each dtype's product and the issue of operators share the budget.
    part_s = budget_s / 4
    copy = seconds_of(copy_work(device, sizes.copy_bytes), part_s, wait).per(sizes.copy_bytes)
    figures = [Figure("copy", "B/s", copy)]
    # A type that a core emulates slowly gets no figure: a full product would take too long.
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
        efficiency={"gemm": 1.0},  # the peak is a product's own speed
        source=facts.source,
        issue_s=rounded(issue.middle),
        gap_s=rounded(issue.middle) if is_cpu else 0.0,  # a core also issues its operators
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


def _source(what: str) -> str:
    measured = f"measured by penstock doctor --calibrate, {date.today()}"
    return f"{what}: {measured}, torch {torch.__version__}"
