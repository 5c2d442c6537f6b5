"""AmoebaNet: the published sizes, images of any size, heads, and who reads whom."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from math import ceil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError
from penstock_recipes.zoo import amoebanet_b, amoebanet_d
from penstock_recipes.zoo.amoebanet import AmoebaNet
from penstock_recipes.zoo.amoebanet.cell import Cell
from penstock_recipes.zoo.amoebanet.genotype import AMOEBANET_B, AMOEBANET_D

Builder = Callable[..., AmoebaNet]
BOTH = pytest.mark.parametrize("build", [amoebanet_b, amoebanet_d])
TINY: dict[str, Any] = {"num_classes": 5, "in_channels": 1, "image_size": 32}


def num_parameters(build: Builder, *sizes: int, **options: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in build(*sizes, **options).parameters())


def tiny(build: Builder, **options: Any) -> AmoebaNet:
    return build(3, 16, **{**TINY, **options})


# -- sizes ------------------------------------------------------------------------------------


def test_amoebanet_b_has_the_papers_557_million_parameters() -> None:
    assert num_parameters(amoebanet_b, 18, 512, auxiliary=False) == 557_277_864
    assert num_parameters(amoebanet_b, num_classes=1001) == 559_072_194


@pytest.mark.parametrize(
    ("sizes", "count", "with_auxiliary"),
    [
        ((18, 208), 81_137_437, 81_785_166),
        pytest.param((18, 416), 317_541_696, 318_277_617, marks=pytest.mark.slow),
        pytest.param((36, 544), 1_053_293_776, 1_054_083_969, marks=pytest.mark.slow),
        pytest.param((72, 512), 1_842_610_248, 1_843_386_873, marks=pytest.mark.slow),
    ],
)
def test_amoebanet_d_has_as_many_parameters_as_the_public_rules_give(
    sizes: tuple[int, int], count: int, with_auxiliary: int
) -> None:
    assert num_parameters(amoebanet_d, *sizes, auxiliary=False) == count
    assert num_parameters(amoebanet_d, *sizes, num_classes=1001) == with_auxiliary


def shapes(model: AmoebaNet, image: Tensor) -> list[tuple[int, ...]]:
    """Give the shapes of what the stem and each cell give, without the batch."""
    found: list[tuple[int, ...]] = []
    for module in (model.stem, *model.cells):
        module.register_forward_hook(lambda *given: found.append(tuple(given[-1].shape[1:])))
    model(image)
    return found


def test_resolutions_and_channels_at_224_pixels() -> None:
    with torch.device("meta"):
        found = shapes(amoebanet_d(6, 208), torch.empty(2, 3, 224, 224))
    assert found == [
        (32, 111, 111),
        (3 * 52, 56, 56),
        (3 * 104, 28, 28),
        *[(4 * 208, 28, 28)] * 2,
        (3 * 416, 14, 14),
        *[(4 * 416, 14, 14)] * 2,
        (3 * 832, 7, 7),
        *[(4 * 832, 7, 7)] * 2,
    ]


@BOTH
@pytest.mark.parametrize(
    ("num_layers", "stacks"), [(3, [1, 1, 1]), (4, [1, 1, 2]), (8, [2, 3, 3])]
)
def test_layers_that_are_no_multiple_of_3_go_to_the_later_stacks(
    build: Builder, num_layers: int, stacks: list[int]
) -> None:
    cells = [made for made in build(num_layers, 16).cells if isinstance(made, Cell)]
    normal = (AMOEBANET_B.normal, AMOEBANET_D.normal)
    runs = [(kind, len([*run])) for kind, run in groupby(c.genotype in normal for c in cells)]
    assert runs == [
        (False, 2),
        (True, stacks[0]),
        (False, 1),
        (True, stacks[1]),
        (False, 1),
        (True, stacks[2]),
    ]


@BOTH
@pytest.mark.parametrize("size", [(32, 32), (35, 50), (64, 61)])
def test_images_of_any_size_from_32_up(build: Builder, size: tuple[int, int]) -> None:
    model = tiny(build, image_size=max(size))
    image = torch.randn(2, 1, *size)
    assert [logits.shape for logits in model(image)] == [(2, 5), (2, 5)]
    assert model.eval()(image).shape == (2, 5)


@BOTH
@pytest.mark.parametrize("size", [4, 5, 23])
def test_small_images_keep_their_size_in_the_stem(build: Builder, size: int) -> None:
    model = tiny(build, image_size=size, small=True)
    stem, *_, last = shapes(model, torch.randn(2, 1, size, size))
    assert stem == (16, size, size)
    assert last == (4 * 64, ceil(ceil(size / 2) / 2), ceil(ceil(size / 2) / 2))


def test_weights_of_one_image_size_serve_others() -> None:
    model = tiny(amoebanet_d, image_size=96)
    for size in (32, 96, 128):
        assert [logits.shape for logits in model(torch.randn(2, 1, size, 96))] == [(2, 5), (2, 5)]


# -- heads ------------------------------------------------------------------------------------


@BOTH
def test_the_auxiliary_head_works_in_training_only(build: Builder) -> None:
    image = torch.randn(2, 1, 32, 32)
    assert isinstance(tiny(build)(image), tuple)
    assert isinstance(tiny(build).eval()(image), Tensor)
    assert isinstance(tiny(build, auxiliary=False)(image), Tensor)


def test_the_auxiliary_head_reads_the_last_cell_of_the_second_stack() -> None:
    model = amoebanet_d(7, 16, **TINY)
    assert model.auxiliary_head is not None
    logits, auxiliary = model(torch.randn(2, 1, 32, 32))
    assert logits.shape == auxiliary.shape
    auxiliary.sum().backward()
    reached = [any(p.grad is not None for p in cell.parameters()) for cell in model.cells]
    second_stack_ends = 2 + 2 + 1 + 2  # stem, first stack, reduction, second stack
    assert reached == [number < second_stack_ends for number in range(2 + 7 + 2)]


@pytest.mark.parametrize(
    ("image_size", "side", "window"), [(224, 14, 4), (480, 30, 9), (32, 2, 1)]
)
def test_the_window_of_the_auxiliary_head_fits_the_image(image_size, side, window) -> None:
    with torch.device("meta"):
        head = amoebanet_d(3, 16, image_size=image_size).auxiliary_head
    assert head is not None
    assert (head.side, head.window) == (side, window)
    assert (head.narrow_conv.out_channels, head.wide_conv.out_channels) == (51, 307)


def test_the_auxiliary_head_pools_5x5_pixels_where_they_fit() -> None:
    head = tiny(amoebanet_d, image_size=224).auxiliary_head
    assert head is not None
    x = torch.randn(2, 3, 14, 14)
    assert torch.equal(head._pooled(x), F.avg_pool2d(x, 5, 3))
    assert head._pooled(x[..., :9]).shape == (2, 3, 4, 4)


def test_no_dropout_in_evaluation_and_some_in_training() -> None:
    model = tiny(amoebanet_d, auxiliary=False)
    image = torch.randn(4, 1, 32, 32)
    assert not torch.equal(model(image), model(image))
    model.eval()
    assert torch.equal(model(image), model(image))


# -- between cells -----------------------------------------------------------------------------


def test_the_first_cell_takes_the_raw_output_of_the_stem_twice() -> None:
    model = tiny(amoebanet_d)
    seen: list[Any] = []
    for number in range(3):
        model.cells[number].register_forward_pre_hook(lambda _, args: seen.append(args))
    given: list[Tensor] = []
    for module in (model.stem, model.cells[0], model.cells[1]):
        module.register_forward_hook(lambda *call: given.append(call[-1]))
    model(torch.randn(2, 1, 32, 32))
    stem, first, second = given
    for args, expected in zip(seen, [(stem, stem), (stem, first), (first, second)], strict=True):
        assert all(a is b for a, b in zip(args, expected, strict=True))


def test_the_second_normal_cell_of_amoebanet_b_reads_the_stems_last_cell_as_it_is() -> None:
    """A reduction of width D / 2 gives D channels, which is what the first stack has."""
    adapters = [made.previous for made in amoebanet_b(6, 16).cells if isinstance(made, Cell)]
    assert [type(adapter) is nn.Identity for adapter in adapters] == [
        *(True, False),  # the stem
        *(False, True),
        *(False, False, False),
        *(False, False, False),
    ]


# -- as others use it -------------------------------------------------------------------------


@BOTH
def test_the_seed_decides_the_weights(build: Builder) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(tiny(build).state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert not torch.equal(states[0]["stem.conv.weight"], states[2]["stem.conv.weight"])


def test_the_statistics_of_batch_norm_are_options() -> None:
    model = tiny(amoebanet_b, norm_momentum=0.0003, norm_epsilon=1e-3)
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(m.momentum, m.eps) for m in norms} == {(0.0003, 1e-3)}
    assert {m.affine for m in norms} == {True}


@BOTH
def test_stem_cells_and_heads_are_the_layers_of_a_pipeline(build: Builder) -> None:
    with torch.device("meta"):
        model, image = build(3, 64, image_size=224), torch.empty(2, 3, 224, 224)
    names = [layer.name for layer in penstock.capture(model, image)]
    cells = [f"cells.{number}" for number in range(2 + 3 + 2)]
    with_auxiliary = 2 + 1 + 1 + 1
    assert names == [
        "stem",
        *cells[:with_auxiliary],
        "auxiliary_head",
        *cells[with_auxiliary:],
        "head",
    ]


# -- bad input --------------------------------------------------------------------------------


@contextmanager
def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def made(*_: Any, **__: Any) -> None:
        raise AssertionError("a module was made")

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__init__", made)
        yield


@BOTH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 2}, "num_layers=2: normal cells come in 3 stacks; give 3 or more"),
        ({"num_filters": 12}, "num_filters=12: .* give a multiple of 4, 16 or more"),
        ({"num_filters": 18}, "num_filters=18: .* give a multiple of 4, 16 or more"),
        ({"num_classes": 0}, "num_classes=0: give 1 or more"),
        ({"in_channels": 0}, "in_channels=0: give 1 or more"),
        ({"image_size": 16}, "image_size=16: .* 32 pixels .* set small=True"),
        ({"image_size": 3, "small": True}, "image_size=3: .* 4 pixels .* make images larger"),
        ({"dropout": 1.0}, r"dropout=1\.0: it is the chance to drop, from 0 to below 1"),
        ({"drop_path": -0.1}, r"drop_path=-0\.1: it is the chance to drop"),
        ({"norm_momentum": 0.0}, r"norm_momentum=0\.0: it is the weight of the newest batch"),
        ({"norm_epsilon": 0.0}, r"norm_epsilon=0\.0: give a number above 0"),
    ],
)
def test_sizes_that_cannot_work_are_refused_before_anything_is_made(
    build: Builder, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with nothing_is_made(monkeypatch), pytest.raises(ConfigError, match=message):
        build(**options)


def test_a_micro_batch_of_one_sample_is_refused_by_the_auxiliary_head() -> None:
    model = tiny(amoebanet_d, image_size=64)
    image = torch.randn(1, 1, 64, 64)
    with pytest.raises(ConfigError, match=r"micro-batch of one sample.*auxiliary=False"):
        model(image)
    assert model.eval()(image).shape == (1, 5)
    assert partial(tiny, auxiliary=False, image_size=64)(amoebanet_d)(image).shape == (1, 5)
