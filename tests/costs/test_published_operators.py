"""The roofline of a preset is near what was published for single products and attention.

No preset is fitted to steps of models; these figures are of one operator each.
"""

import pytest

from penstock.costs.cluster.files import device_preset
from penstock.costs.records import Operator, Part
from penstock.costs.roofline import operator_seconds

NEAR = 0.15
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS, WIDTH = 16384, 2048
"""Positions of all sequences, and the size of all heads, in the charts."""
ATTENTION = {
    (Part.FORWARD, False, 64): (282, 306, 318, 321, 322, 324),
    (Part.FORWARD, False, 128): (309, 350, 362, 368, 370, 370),
    (Part.FORWARD, True, 64): (180, 229, 262, 284, 295, 299),
    (Part.FORWARD, True, 128): (191, 260, 298, 319, 333, 335),
    (Part.FORWARD, True, 256): (208, 251, 278, 293, 297, 298),
    (Part.INPUT, False, 128): (214, 260, 291, 310, 318, 322),
}
"""TFLOP/s of FlashAttention-2 on an H100 SXM5 in 16 bits by length, for causal or not and the size
of a head (arXiv 2407.08608, figures 5 and 6)."""
PRODUCTS = [
    ("v100-sxm2", "float16", 96),
    ("a100-80gb", "bfloat16", 271),
    ("h100", "bfloat16", 795),
    ("h100", "float8_e4m3fn", 1403),
    ("h200", "bfloat16", 795),
    ("h200", "float8_e4m3fn", 1453),
    ("b200", "bfloat16", 1745),
    ("b200", "float8_e4m3fn", 3433),
    ("b300", "bfloat16", 1769),
    ("b300", "float8_e4m3fn", 3353),
    ("gb200", "bfloat16", 1822),
    ("gb200", "float8_e4m3fn", 3616),
]
"""TFLOP/s of the best of many shapes (github.com/stas00/ml-engineering, compute/accelerator); of
the V100 one of 8192 x 8192 x 8192 (github.com/mli/transformers-benchmarks, matmul.ipynb)."""


def attention(part: Part, is_causal: bool, head: int, length: int) -> Operator:
    batch = TOKENS // length * WIDTH // head
    flops = (2 if part is Part.FORWARD else 5) * 2 * batch * length * length * head
    return Operator(
        name="attention",
        part=part,
        flops=flops * (length + 1) // (2 * length) if is_causal else flops,
        num_bytes=(4 if part is Part.FORWARD else 8) * 2 * TOKENS * WIDTH,
        dims=(length, length, head),
        batch=batch,
        dtype="bfloat16",
    )


def tflops(operator: Operator, name: str) -> float:
    return operator.flops / operator_seconds(operator, device_preset(name)) / 1e12


@pytest.mark.parametrize(("how", "published"), ATTENTION.items())
def test_attention_of_every_length_is_near_the_charts(
    how: tuple[Part, bool, int], published: tuple[int, ...]
) -> None:
    found = [tflops(attention(*how, length), "h100") for length in LENGTHS]
    assert found == pytest.approx(published, rel=NEAR)


@pytest.mark.parametrize(("name", "dtype", "published"), PRODUCTS)
def test_the_best_product_is_near_the_best_that_was_found(
    name: str, dtype: str, published: int
) -> None:
    width = 1024 if dtype.startswith("float8") else 2048
    best = max(
        tflops(
            Operator(
                name="gemm",
                part=Part.FORWARD,
                flops=2 * rows * columns * 16384,
                num_bytes=width // 1024 * 16384 * (rows + columns) + 2 * rows * columns,
                dims=(rows, columns, 16384),
                dtype=dtype,
            ),
            name,
        )
        for rows in range(4096, 16385, 2048)
        for columns in range(4096, 16385, 2048)
    )
    assert best == pytest.approx(published, rel=NEAR)
