"""Measure on a card what its preset assumes, and say by how much each figure is off.

products      squares of several sizes, in each type of which the preset has the peak
attention     causal, by size of head and length, forward and backward
copies        in memory, and to the host and back
the host      the issue of an operator
kernels       the least one, and the gap after it
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import profile

from penstock.costs.cluster import Device
from penstock.costs.cluster.files import preset_of
from penstock.costs.records import Operator, Part
from penstock.costs.roofline import operator_seconds
from penstock.trace.units import columns, percent_text

from .figures import (
    CHAIN,
    Figure,
    Run,
    Spread,
    copy_work,
    gemm_work,
    issue_work,
    rounded,
    seconds_of,
    value_text,
)

Measure = Callable[[Run, float, Callable[[], None]], Spread]
"""Times a run for a budget of seconds, as `seconds_of`."""
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_CHAINS = 20
"""Measurements of small kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSizes:
    """Sizes of the work: rows of products, attention, bytes of copies."""

    products: tuple[int, ...] = (2048, 4096, 8192)
    heads: tuple[int, ...] = (64, 128)
    """Sizes of a head."""
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    tokens: int = 16384
    """Positions of all sequences."""
    width: int = 2048
    """Size of all heads."""
    copy_bytes: int = 1 << 30
    host_bytes: int = 1 << 28


OF_A_CARD = CardSizes()


class Compared(NamedTuple):
    """A measured figure beside the preset's."""

    figure: Figure
    preset: float | None
    """What the preset predicts, in the same unit; None if it says nothing."""
    key: str
    """The line of a device's file that decides it, such as "efficiency.gemm.bfloat16"."""
    value: float
    """The number there with which the preset would predict what was measured."""

    @property
    def off(self) -> float | None:
        """The preset over what was measured, less 1; None if it says nothing."""
        return None if self.preset is None else self.preset / self.figure.spread.middle - 1


def compared_cards(budget_s: float) -> dict[str, list[Compared]]:
    """Compare each kind of card that is here with its preset, by the preset's name.

    A card without a preset is left out.  Each takes about `budget_s` seconds.
    """
    found: dict[str, list[Compared]] = {}
    for n in range(torch.cuda.device_count()):
        device = torch.device("cuda", n)
        known = torch.cuda.get_device_properties(device)
        preset = preset_of(known.name, known.total_memory)
        if preset is not None and preset.name not in found:
            found[preset.name] = compare(device, preset, budget_s)
    return found


def compare(
    device: torch.device,
    preset: Device,
    budget_s: float,
    sizes: CardSizes = OF_A_CARD,
    measure: Measure = seconds_of,
) -> list[Compared]:
    """Measure a device for about `budget_s` seconds, beside what a preset says of it."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    kernels = [*_products(device, preset, sizes), *_attention(device, preset, sizes)]
    part_s = budget_s / (len(kernels) + 5)
    # 1. Kernels, whose seconds depend on a share of the peak.
    found = [
        _of_kernel(name, operator, preset, measure(make(), part_s, wait))
        for name, operator, make in kernels
    ]
    # 2. Copies, in memory and over the host's link.
    away, back = (partial(_host_work, to_host=to_host) for to_host in (True, False))
    copies: dict[str, tuple[str, int, Callable[[torch.device, int], Run]]] = {
        "a copy in memory": ("bytes_per_s", sizes.copy_bytes, copy_work),
        "a copy to the host": ("host_bytes_per_s", sizes.host_bytes, away),
        "a copy from the host": ("host_bytes_per_s", sizes.host_bytes, back),
    }
    for name, (key, num_bytes, work) in copies.items():
        spread = measure(work(device, num_bytes), part_s, wait).per(num_bytes)
        found.append(_of_field(Figure(name, "B/s", spread), preset, key))
    # 3. The host's time for an operator, and the device's for a small one.
    issue = measure(issue_work(device), part_s, lambda: None).times(1 / (2 * CHAIN))
    wait()
    found.append(_of_field(Figure("an operator is issued", "s", issue), preset, "issue_s"))
    floor, gap = _small_kernels(device, measure, part_s)
    found.append(_of_field(Figure("a small kernel", "s", floor), preset, "floor_s"))
    if gap is not None:
        found.append(_of_field(Figure("the gap after a kernel", "s", gap), preset, "gap_s"))
    return found


def compared_lines(name: str, found: Sequence[Compared]) -> Iterator[str]:
    """Yield a table of figures beside those of a preset, and lines for a file of a cluster."""
    rows = [(f"compared with the preset {name}", "measured", "preset", "preset is off")]
    for own in found:
        unit, off = own.figure.unit, own.off
        told = "" if own.preset is None else value_text(unit, own.preset)
        percent = "" if off is None else f"{'+' * (off >= 0)}{percent_text(off)}"
        rows.append((own.figure.name, value_text(unit, own.figure.spread.middle), told, percent))
    yield from columns(rows, num_left=1)
    yield from ("", "as measured, for a file of a cluster:", "", f"[devices.{name}]")
    yield f'preset = "{name}"'
    values = file_values(found)
    yield from (f"{key} = {value:g}" for key, value in values.items() if "." not in key)
    yield f"[devices.{name}.efficiency]"
    for key, value in values.items():
        _, dot, kind = key.partition(".")
        if dot:
            yield f'"{kind}" = {value:g}'


def file_values(found: Iterable[Compared]) -> dict[str, float]:
    """Return the number of each line of a device's file: the median of those that decide it."""
    every: dict[str, list[float]] = {}
    for own in found:
        every.setdefault(own.key, []).append(own.value)
    return {key: rounded(median(values)) for key, values in every.items()}


def _of_kernel(name: str, operator: Operator, preset: Device, took: Spread) -> Compared:
    key = f"{operator.name}.{operator.dtype}"
    at_peak = replace(preset, efficiency={key: 1.0}, floor_s=0.0, gap_s=0.0)
    work_s = operator_seconds(replace(operator, num_bytes=0), at_peak)
    beside_s = operator_seconds(operator, at_peak) - work_s + preset.gap_s
    share = work_s / max(took.middle - beside_s, 1e-9)
    figure = Figure(name, "FLOP/s", took.per(operator.flops))
    predicted = operator.flops / operator_seconds(operator, preset)
    return Compared(figure, predicted, f"efficiency.{key}", share)


def _of_field(figure: Figure, preset: Device, key: str) -> Compared:
    return Compared(figure, getattr(preset, key), key, figure.spread.middle)


_Kernel = tuple[str, Operator, Callable[[], Run]]
"""A name, what the roofline knows of it, and what makes its tensors."""


def _products(device: torch.device, preset: Device, sizes: CardSizes) -> Iterator[_Kernel]:
    for dtype in _types(preset):
        for size in sizes.products:
            name = str(dtype).removeprefix("torch.")
            operator = Operator(
                name="gemm",
                part=Part.FORWARD,
                flops=2 * size**3,
                num_bytes=3 * dtype.itemsize * size**2,
                dims=(size, size, size),
                dtype=name,
            )
            yield f"product {name}, {size}", operator, partial(gemm_work, device, size, dtype)


def _attention(device: torch.device, preset: Device, sizes: CardSizes) -> Iterator[_Kernel]:
    dtype = _types(preset)[-1]
    name, each = str(dtype).removeprefix("torch."), sizes.tokens * sizes.width * dtype.itemsize
    for head in sizes.heads:
        for length in sizes.lengths:
            shape = sizes.tokens // length, sizes.width // head, length, head
            products = shape[0] * shape[1] * length * (length + 1) * head  # half: it is causal
            for part, times in ((Part.FORWARD, 2), (Part.INPUT, 5)):
                operator = Operator(
                    name="attention",
                    part=part,
                    flops=times * products,
                    num_bytes=(4 if part is Part.FORWARD else 8) * each,
                    dims=(length, length, head),
                    batch=shape[0] * shape[1],
                    dtype=name,
                )
                way = "forward" if part is Part.FORWARD else "backward"
                make = partial(_attention_work, device, shape, dtype, part)
                yield f"attention {name}, head {head}, {length}, {way}", operator, make


def _types(preset: Device) -> list[torch.dtype]:
    """Return the types of which the preset has the peak; attention has the last one."""
    return [own for own in _TYPES if str(own).removeprefix("torch.") in preset.flops_per_s]


def _attention_work(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, part: Part
) -> Run:
    """Return causal attention over [B, H, T, C], or its backward."""
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    if part is Part.FORWARD:
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    result = scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(result)
    return lambda: torch.autograd.grad(result, (q, k, v), gradient, retain_graph=True)


def _host_work(device: torch.device, num_bytes: int, *, to_host: bool) -> Run:
    """Return a copy between a device and its host, whose memory is pinned for a card."""
    there = torch.ones(num_bytes // 4, device=device)
    here = torch.ones(num_bytes // 4, pin_memory=device.type == "cuda")
    source, target = (there, here) if to_host else (here, there)
    return lambda: target.copy_(source, non_blocking=True)


def _small_kernels(
    device: torch.device, measure: Measure, budget_s: float
) -> tuple[Spread, Spread | None]:
    """Return the seconds of a small kernel and of the gap after it; no gap on a core."""
    x = torch.ones(1, device=device)

    def chain() -> None:
        for _ in range(CHAIN):
            x.neg_()

    if device.type != "cuda":
        return measure(chain, budget_s, lambda: None).times(1 / CHAIN), None
    busy = gemm_work(device, OF_A_CARD.products[-1])  # the host gets ahead of the chain meanwhile
    both_s = []
    for _ in range(_CHAINS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        busy()
        begin.record()
        chain()
        end.record()
        torch.cuda.synchronize(device)
        both_s.append(begin.elapsed_time(end) / 1000 / CHAIN)  # from milliseconds
    with profile() as profiled:
        chain()
        torch.cuda.synchronize(device)
    of_device = [e for e in profiled.key_averages() if e.device_type.name == "CUDA"]
    floor_s = sum(event.self_device_time_total for event in of_device) / 1e6 / CHAIN
    gaps_s = [max(0.0, seconds - floor_s) for seconds in both_s]
    return Spread(floor_s, floor_s, floor_s), Spread.of(gaps_s)
