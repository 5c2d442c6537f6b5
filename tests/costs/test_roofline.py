"""An operator takes as long as its products or its bytes, whichever is slower."""

from dataclasses import replace
from math import gcd
from typing import Any

import pytest

from penstock.costs.cluster import Device
from penstock.costs.cluster.files import device_preset
from penstock.costs.records import MOVES, PRODUCTS, Operator, Part
from penstock.costs.roofline import USUAL, operator_seconds, operators_seconds
from penstock.errors import ConfigError

DEVICE = Device(
    name="slow",
    flops_per_s={"float32": 1000.0},
    bytes_per_s=100.0,
    memory_bytes=1,
    efficiency={"gemm": 0.5, "elementwise": 1.0},
)


def op(name: str = "gemm", flops: int = 1000, num_bytes: int = 0, **rest: Any) -> Operator:
    return Operator(name=name, **{"part": Part.FORWARD, **rest}, flops=flops, num_bytes=num_bytes)


def seconds(operator: Operator, **changes: Any) -> float:
    return operator_seconds(operator, replace(DEVICE, **changes))


def test_a_product_takes_the_longer_of_its_flops_and_its_bytes() -> None:
    assert seconds(op(flops=1000, num_bytes=100)) == 1000 / (1000 * 0.5)
    assert seconds(op(flops=1000, num_bytes=500)) == 500 / 100


def test_what_is_no_product_takes_its_bytes_however_many_flops_it_has() -> None:
    assert seconds(op("norm", flops=10**9, num_bytes=90)) == pytest.approx(90 / (100 * 0.9))


def test_each_kernel_has_its_floor_and_the_gap_after_it() -> None:
    operator = op("elementwise", 0, 100, count=3)
    assert seconds(operator, floor_s=0.25, gap_s=0.5) == 3 * (1 + 0.5)
    assert seconds(operator, floor_s=4.0, gap_s=0.5) == 3 * (4 + 0.5)


def test_a_compiler_that_fuses_leaves_a_share_of_elementwise_bytes_only() -> None:
    assert seconds(op("elementwise", 0, 100), elementwise_fusion=0.5) == 0.5
    assert seconds(op("reduce", 0, 100), elementwise_fusion=0.5) == 1.0


@pytest.mark.parametrize(
    ("efficiency", "share"),
    [
        ({"gemm": 0.5}, 0.5),
        ({"gemm": 0.5, "gemm.float32": 0.4}, 0.4),
        ({"gemm": 0.5, "gemm.float32": 0.4, "gemm.weight": 0.2}, 0.2),
        ({"gemm": 0.5, "gemm.bfloat16": 0.4, "gemm.input": 0.2}, 0.5),
        ({}, USUAL["gemm"]),
    ],
)
def test_the_most_special_efficiency_counts(efficiency: dict[str, float], share: float) -> None:
    operator = op(part=Part.WEIGHT)
    assert seconds(operator, efficiency=efficiency) == pytest.approx(1 / share)


def test_the_backward_of_a_convolution_is_slower_by_the_usual_ratio_unless_it_is_named() -> None:
    parts = [op("conv3x3", part=part) for part in Part]
    usual = [seconds(part, efficiency={"conv3x3": 2.0}) for part in parts]
    assert usual == pytest.approx([1 / 2, 1 / (2 * 0.95), 1 / (2 * 0.8)])
    named = {"conv3x3": 2.0, "conv3x3.input": 0.5, "conv3x3.weight": 0.25}
    assert [seconds(part, efficiency=named) for part in parts] == [0.5, 2, 4]


@pytest.mark.parametrize(
    ("dims", "batch", "units", "fill"),
    [
        ((64, 32, 1), 1, 1, 1),
        ((65, 32, 1), 1, 1, 65 / 128),
        ((32, 64, 1), 1, 1, 1),  # a tile may lie as it likes
        ((64, 32, 1), 3, 2, 3 / 4),  # three tiles take two waves of two
        ((64, 32, 1), 1, 4, 1 / 4),
        ((64, 32, 256), 1, 4, 1),  # so deep that four units share it
        ((64, 32, 128), 1, 4, 1 / 2),
    ],
)
def test_tiles_and_waves_that_are_not_full_take_as_long_as_full_ones(
    dims: tuple[int, ...], batch: int, units: int, fill: float
) -> None:
    took = seconds(op(dims=dims, batch=batch), tile=(64, 32), units=units)
    assert took == pytest.approx(2 / fill)


def test_a_dtype_without_a_peak_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'slow' has no flops_per_s\.bfloat16.*has float32"):
        seconds(op(dtype="bfloat16"))
    assert seconds(op("copy", 0, 100, dtype="bfloat16")) == 1.0


def test_parts_are_added_up_each_alone() -> None:
    operators = [op(), op(part=Part.INPUT, count=2), op("copy", 0, 100, part=Part.INPUT)]
    assert operators_seconds(operators, DEVICE, Part.FORWARD) == 2
    assert operators_seconds(operators, DEVICE, Part.INPUT) == 5
    assert operators_seconds(operators, DEVICE, Part.WEIGHT) == 0


def test_each_class_has_a_usual_efficiency() -> None:
    assert USUAL.keys() == {*PRODUCTS, *MOVES}


A100_40GB = device_preset("a100-40gb")


@pytest.mark.parametrize(
    ("batch", "rows", "depth", "columns", "tflops"),
    [
        # float16 on an A100 of 40 GB: Anthony et al. 2024, arXiv 2401.14489; numbers in
        # github.com/EleutherAI/cookbook, sizing/results at 27dff48
        (64, 2048, 128, 2048, 91.6),  # scores: bytes are written last
        (64, 2048, 192, 2048, 113.7),
        (64, 2048, 256, 2048, 127.6),
        (64, 2048, 2048, 128, 134.8),  # values: bytes are read meanwhile
        (1, 8192, 8192, 6144, 228.5),
        (1, 8192, 2048, 8192, 216.6),
        (1, 8192, 8192, 8192, 254.0),
        (1, 27648, 4096, 384, 242.6),
        (1, 8192, 14336, 51144, 227.9),
        (1, 8192, 14336, 51137, 76.1),  # rows of odd lengths, in memory
        (1, 8192, 14273, 51200, 72.0),
        (1, 8192, 14336, 51138, 136.9),  # and of even ones
    ],
)
def test_products_take_as_long_as_others_measured(
    batch: int, rows: int, depth: int, columns: int, tflops: float
) -> None:
    numbers = rows * depth + depth * columns + rows * columns
    product = op(
        flops=2 * batch * rows * depth * columns,
        num_bytes=2 * batch * numbers,
        dims=(rows, columns, depth),
        batch=batch,
        dtype="float16",
        alignment=gcd(8, depth, columns),
    )
    predicted = product.flops / operator_seconds(product, A100_40GB) / 1e12
    assert predicted == pytest.approx(tflops, rel=0.2 if product.alignment < 8 else 0.13)


def test_a_core_writes_results_while_it_computes() -> None:
    product = op(flops=1000, num_bytes=200, dims=(4, 5, 25))
    assert seconds(product) == 2
    assert seconds(product, tile=(8, 8)) > 2 + 4 * 5 * 4 / 100
