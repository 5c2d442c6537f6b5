"""The cells of AmoebaNet: their sums, their states, and the operations in them."""

from math import ceil, sqrt
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock_recipes.zoo import DropPath
from penstock_recipes.zoo.amoebanet.cell import Cell, Previous
from penstock_recipes.zoo.amoebanet.genotype import AMOEBANET_B, AMOEBANET_D, CellGenotype
from penstock_recipes.zoo.amoebanet.operations import (
    OPERATIONS,
    FactorizedReduction,
    SameConv2d,
    SamePool,
    same_padding,
)


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels)


def cell(genotype: CellGenotype, previous: Previous | None = None, **options: Any) -> Cell:
    made = {"width": 8, "stride": 1, "channels": 6, "norm": norm, "drop_path": 0.0, **options}
    return Cell(genotype, previous=previous, **made)


@pytest.mark.parametrize(
    ("genotype", "outputs"),
    [
        *((AMOEBANET_D.normal, 4), (AMOEBANET_D.reduction, 3)),
        *((AMOEBANET_B.normal, 4), (AMOEBANET_B.reduction, 2)),
    ],
)
def test_a_cell_has_five_sums_of_known_operations(genotype: CellGenotype, outputs: int) -> None:
    assert len(genotype.sums) == 5
    assert {step.operation for pair in genotype.sums for step in pair} <= OPERATIONS.keys()
    assert cell(genotype).channels == outputs * 8


def dropping_all(model: nn.Module) -> None:
    """Let drop-path drop every example."""
    for module in model.modules():
        if isinstance(module, DropPath):
            module.rate = 1 - 1e-9


@pytest.mark.parametrize("genotype", [AMOEBANET_B, AMOEBANET_D])
def test_drop_path_spares_none_and_nothing_else(genotype: Any) -> None:
    """State 3 of a normal cell is none(1) + ..., states 4 and 6 have no way around drop-path."""
    made = cell(genotype.normal, Previous(8, is_larger=False), drop_path=0.5)
    dropping_all(made)
    before, now = torch.randn(2, 8, 5, 5), torch.randn(2, 6, 5, 5)
    state0, state3, state4, state6 = made(before, now).split(8, dim=1)
    assert torch.equal(state0, made.current(now))
    assert torch.equal(state3, before)
    assert not state4.any() and not state6.any()


def test_state_1_is_brought_to_the_cells_size_in_the_cheapest_way_that_works() -> None:
    made = {
        "first": cell(AMOEBANET_D.normal, None),
        "fits": cell(AMOEBANET_D.normal, Previous(8, is_larger=False)),
        "channels": cell(AMOEBANET_D.normal, Previous(6, is_larger=False)),
        "larger": cell(AMOEBANET_D.normal, Previous(8, is_larger=True)),
    }
    kinds = {name: type(module.previous) for name, module in made.items()}
    assert kinds == {
        "first": nn.Identity,
        "fits": nn.Identity,
        "channels": nn.Sequential,
        "larger": FactorizedReduction,
    }
    relu, conv, _ = made["channels"].previous.children()
    assert isinstance(relu, nn.ReLU) and isinstance(conv, nn.Conv2d)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(("window", "stride"), [(3, 1), (3, 2), (2, 2)])
@pytest.mark.parametrize("maximum", [True, False])
def test_pooling_leaves_the_padding_out(
    window: int, stride: int, size: int, *, maximum: bool
) -> None:
    x = torch.randn(2, 3, size, 5)
    (top, bottom), (left, right) = (same_padding(n, window, stride) for n in (size, 5))
    sides = (left, right, top, bottom)
    if maximum:
        expected = F.max_pool2d(F.pad(x, sides, value=-torch.inf), window, stride)
    else:
        inside = F.avg_pool2d(F.pad(torch.ones_like(x), sides), window, stride)
        expected = F.avg_pool2d(F.pad(x, sides), window, stride) / inside
    found = SamePool(window, stride, maximum=maximum)(x)
    assert found.shape == (2, 3, ceil(size / stride), ceil(5 / stride))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize(
    ("window", "stride"), [((3, 3), (2, 2)), ((1, 7), (1, 2)), ((7, 1), (2, 1)), ((5, 5), (1, 1))]
)
def test_a_convolution_pads_the_odd_pixel_at_the_end(window, stride, size) -> None:
    conv = SameConv2d(3, 2, window, stride)
    x = torch.randn(2, 3, size, 6)
    (top, bottom), (left, right) = map(same_padding, (size, 6), window, stride)
    expected = F.conv2d(F.pad(x, (left, right, top, bottom)), conv.weight, stride=stride)
    torch.testing.assert_close(conv(x), expected)
    assert conv(x).shape == (2, 2, ceil(size / stride[0]), ceil(6 / stride[1]))


HALVING_ONLY = "max_pool_2x2"
"""No cell has it with stride 1."""


@pytest.mark.parametrize("channels", [8, 12])
@pytest.mark.parametrize(
    ("name", "stride"), [(n, s) for n in OPERATIONS for s in (1, 2) if (n, s) != (HALVING_ONLY, 1)]
)
def test_an_operation_gives_the_channels_and_resolution_that_are_asked_for(
    name: str, stride: int, channels: int
) -> None:
    made = OPERATIONS[name](channels, 8, stride, norm)
    for size in range(1, 9):
        side = ceil(size / stride)
        assert made(torch.randn(2, channels, size, size)).shape == (2, 8, side, side)


def test_only_reductions_pool_2x2_pixels_and_only_of_what_they_halve() -> None:
    for genotype in (AMOEBANET_B, AMOEBANET_D):
        normal, steps = (
            [step for pair in kind.sums for step in pair]
            for kind in (genotype.normal, genotype.reduction)
        )
        assert HALVING_ONLY not in {step.operation for step in normal}
        assert {step.state for step in steps if step.operation == HALVING_ONLY} <= {0, 1}


def test_a_factorised_reduction_reads_every_second_pixel_and_those_beside_them() -> None:
    reduction = FactorizedReduction(1, 2, norm).eval()
    for conv in (reduction.here, reduction.beside):
        nn.init.ones_(conv.weight)
    reduction.norm = nn.Identity()  # type: ignore[assignment]  # to see what it is given
    x = torch.arange(1.0, 26).view(1, 1, 5, 5)
    here, beside = reduction(x)[0]
    assert torch.equal(here, x[0, 0, ::2, ::2])
    assert torch.equal(beside[:2, :2], x[0, 0, 1::2, 1::2])
    assert not beside[2].any() and not beside[:, 2].any()


def test_weights_start_with_a_variance_by_the_fan_out() -> None:
    for conv, fan_out in (
        (SameConv2d(64, 128, (3, 3)), 128 * 9),
        (SameConv2d(4096, 4096, (5, 5), groups=4096), 25),
    ):
        assert float(conv.weight.detach().std()) == pytest.approx(sqrt(2 / fan_out), rel=0.02)
        assert conv.bias is None
