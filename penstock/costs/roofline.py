"""The roofline: seconds of operators on a device, by its peak or its memory.

    seconds = max(FLOPs / (peak * efficiency * fill), bytes / (copy * efficiency), floor) + gap

Products may be bound by either; all other classes are bound by their bytes, and views take no
time.  The efficiency of a class is the device's figure, or the one of `USUAL`.

A unit of a GPU reads the operands of a tile while it multiplies, and writes the tile when it is
done:

    matrix product     max(FLOPs / ..., bytes read / copy) + bytes written / copy
"""

from collections.abc import Iterable
from math import ceil

from penstock.errors import ConfigError

from .cluster import Device
from .records import PRODUCTS, VIEW, Operator, Part

USUAL = {
    "gemm": 0.88,
    "attention": 0.6,
    "conv1x1": 0.75,
    "conv3x3": 0.70,
    "conv": 0.70,
    "norm": 0.9,
    "pool": 0.6,
    "reduce": 1.0,
    "elementwise": 1.0,
    "embedding": 1.0,
    "copy": 1.0,
}
"""The usual share of the peak (products) or of the copy (all else).

Assumed once, from what float32 kernels of cuBLAS and cuDNN usually reach on Pascal and Volta, and
fitted to no run of a pipeline; a device's own figures count before them.  Attention: fused kernels
reach 50 to 73 % of an A100's peak (FlashAttention-2, Dao 2023, arXiv 2307.08691, abstract), where
causal attention counts half of the products; the figure is that of long sequences.  A class with
1.0 streams its memory once, as a copy does.
"""
USUAL_OF_PART = {Part.INPUT: 0.95, Part.WEIGHT: 0.80}
"""Efficiency of a convolution's backward over its forward's (assumed likewise)."""
_KEYS_OF_ITS_OWN = {Part.FORWARD: 1.0, Part.INPUT: 2.0, Part.WEIGHT: 2.0}
"""Tiles of keys in whose time a tile of queries of fused attention begins and ends.

FlashAttention-2 on an H100 takes as long (arXiv 2407.08608, figures 5 and 6, heads of 64 to 256,
512 to 16,384 positions): with one efficiency all these figures are met within 14 %.  Its backward
also sums up gradients of queries and makes them narrow.
"""
_OF_ALIGNMENT = {1: 0.29, 2: 0.6, 4: 0.6}
"""Shares of the usual speed that products of 16 bits and less reach, by their alignment.

Medians of products of 8192 rows on an A100: odd and even numbers of columns have 0.29 and 0.54,
such depths 0.28 and 0.68 (Anthony et al. 2024, arXiv 2401.14489; numbers in
github.com/EleutherAI/cookbook, sizing/results at 27dff48).
"""
_BYTES_OF_RESULTS = {"float64": 8, "float32": 4}
"""Bytes of a number in the result of a product, by dtype; others have 2."""


def operator_seconds(operator: Operator, device: Device) -> float:
    """Return the seconds of all `count` runs of an operator; a ConfigError without a peak."""
    if operator.name == VIEW:
        return 0.0
    share, copy = _efficiency(operator, device), device.bytes_per_s
    num_bytes, written = float(operator.num_bytes), _written_last(operator, device)
    if operator.name == "elementwise":
        num_bytes *= device.elementwise_fusion
    if operator.name in PRODUCTS:
        fill = _keys_share(operator, device) * _fill(operator, device)
        fill *= _aligned(operator, device)
        reached = _peak(operator, device) * share * fill
        work_s = max(operator.flops / reached, (num_bytes - written) / copy) + written / copy
    else:
        work_s = num_bytes / (copy * share)
    one_s = max(work_s, device.floor_s) + device.gap_s
    return one_s * operator.count


def operators_seconds(operators: Iterable[Operator], device: Device, part: Part) -> float:
    """Return the seconds of the operators in one part of a layer's work."""
    return sum(operator_seconds(x, device) for x in operators if x.part is part)


def _efficiency(operator: Operator, device: Device) -> float:
    """Return the efficiency of an operator: the device's most special figure, or the usual one.

    A figure without a part holds for the forward; the backward has the usual ratio to it.
    """
    name, figures = operator.name, device.efficiency
    of_part = figures.get(f"{name}.{operator.part.value}")
    if of_part is not None:
        return of_part
    known = figures.get(f"{name}.{operator.dtype}", figures.get(name, USUAL[name]))
    ratio = USUAL_OF_PART.get(operator.part, 1.0) if name.startswith("conv") else 1.0
    return known * ratio


def _peak(operator: Operator, device: Device) -> float:
    try:
        return device.flops_per_s[operator.dtype]
    except KeyError:
        raise ConfigError(
            f"device {device.name!r} has no flops_per_s.{operator.dtype}, and the model has "
            f"products of that dtype; it has {', '.join(sorted(device.flops_per_s))}. Add that "
            "peak, or run the model in one of these"
        ) from None


def _written_last(operator: Operator, device: Device) -> int:
    """Return the bytes of a matrix product that are written after its work; 0 if none are known.

    A core writes results while it computes others.
    """
    if operator.name != "gemm" or not operator.dims or device.tile == (1, 1):
        return 0
    rows, columns, _ = operator.dims
    result = operator.batch * rows * columns * _BYTES_OF_RESULTS.get(operator.dtype, 2)
    return min(result, operator.num_bytes)


def _aligned(operator: Operator, device: Device) -> float:
    """Return the share of its speed that a product keeps where rows in memory are not aligned.

    Loads of several numbers at once need it; units that compute tiles have them in 16 bits.
    """
    if operator.name != "gemm" or operator.dtype in _BYTES_OF_RESULTS or device.tile == (1, 1):
        return 1.0
    return _OF_ALIGNMENT.get(operator.alignment, 1.0)


def _keys_share(operator: Operator, device: Device) -> float:
    """Return the share of its time in which attention computes products that count; 1 for others.

    Each tile of queries goes through the keys that it sees.  A causal one computes the tile of
    keys on the diagonal whole, of which half counts.
    """
    if operator.name != "attention" or not operator.dims:
        return 1.0
    rows, columns, depth = operator.dims
    products = 2 if operator.part is Part.FORWARD else 5
    keys = min(columns, operator.flops / (2 * products * operator.batch * rows * depth))
    tile = max(device.tile)
    more = _KEYS_OF_ITS_OWN[operator.part] * tile + (tile / 2 if keys < columns else 0)
    return keys / (keys + more)


def _fill(operator: Operator, device: Device) -> float:
    """Return the share of the device that a product keeps busy.

    Its last tiles and its last wave are not full.  A product with fewer tiles than units has its
    depth split among the units, as libraries do.
    """
    if not operator.dims:
        return 1.0
    rows, columns, depth = operator.dims
    return max(
        _fill_by((rows, columns, depth), operator.batch, tile, device.units)
        for tile in (device.tile, device.tile[::-1])
    )


def _fill_by(dims: tuple[int, int, int], batch: int, tile: tuple[int, int], units: int) -> float:
    rows, columns, depth = dims
    padded = ceil(rows / tile[0]) * ceil(columns / tile[1])
    tiles = padded * batch
    if tiles < units:
        tiles *= max(1, min(units // tiles, depth // max(tile)))
    waves = ceil(tiles / units)
    of_tiles = rows * columns / (padded * tile[0] * tile[1])
    return of_tiles * tiles / (waves * units)
