"""Wide ResNets: published parameter counts, the library's outputs, any size of image."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from benchmarks.alpa_paper.wide_resnet import (
    BLOCKS,
    WIDE_RESNET_SIZES,
    Bottleneck,
    WideResNetSize,
    bottleneck_resnet,
    wide_resnet,
)
from penstock.errors import ConfigError


def count(build: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


@pytest.mark.parametrize(("num_layers", "published"), [(50, 25_557_032), (101, 44_549_160)])
def test_published_parameter_counts(num_layers: int, published: int) -> None:
    assert count(lambda: bottleneck_resnet(BLOCKS[num_layers])) == published


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        *(("250M", 254_123_104), ("500M", 495_046_176), ("1B", 1_005_653_184)),
        *(("2B", 1_965_011_008), ("4B", 4_000_937_344), ("6.8B", 6_727_679_424)),
        ("13B", 12_633_386_944),
    ],
)
def test_a_wide_network_has_the_parameters_of_its_name_to_3_percent(size, expected) -> None:
    number, unit = float(size[:-1]), {"M": 1e6, "B": 1e9}[size[-1]]
    assert count(lambda: wide_resnet(size)) == expected == pytest.approx(number * unit, rel=0.03)


def test_every_wide_size_has_a_name() -> None:
    sizes = WIDE_RESNET_SIZES.values()
    assert [size.num_layers for size in sizes] == [50] * 6 + [101]
    custom = WideResNetSize(50, 4, 2)
    assert count(lambda: wide_resnet(custom, num_classes=3)) == count(
        lambda: bottleneck_resnet(base_channels=4, width_factor=2, num_classes=3)
    )


def small_resnet() -> nn.Sequential:
    return bottleneck_resnet((1, 2), 8, num_classes=5)


def small_library_resnet() -> Any:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[32, 64], depths=[1, 2])
    config.num_labels = 5
    return ResNetForImageClassification(config)


def test_it_computes_what_the_library_computes() -> None:
    ours, library = small_resnet(), small_library_resnet()
    stages = [block for stage in library.resnet.encoder.stages for block in stage.layers]
    theirs: list[nn.Module] = [library.resnet.embedder]
    for block in stages:
        theirs += [block.layer, block.shortcut]  # theirs holds the shortcut first
    theirs.append(library.classifier)
    values = chain.from_iterable(part.state_dict().values() for part in theirs)
    ours.load_state_dict(dict(zip(ours.state_dict(), values, strict=True)))
    x_BCHW = torch.randn(2, 3, 40, 33)
    for mode in (True, False):
        assert torch.equal(ours.train(mode)(x_BCHW), library.train(mode)(x_BCHW).logits)


def test_a_resnet_is_a_plain_list_of_named_layers() -> None:
    model = small_resnet()
    assert type(model) is nn.Sequential
    stem, tail = ["stem", "stem_norm", "stem_relu", "stem_pool"], ["pool", "flatten", "head"]
    names = [name for name, _ in model.named_children()]
    assert names == [*stem, "block0", "block1", "block2", *tail]


@pytest.mark.parametrize("size", [1, 32, 33, 50])
def test_images_of_any_size_are_classified(size: int) -> None:
    assert small_resnet()(torch.randn(2, 3, size, size + 1)).shape == (2, 5)


def test_the_width_factor_widens_the_3x3_convolution_alone() -> None:
    weights = [p.shape for p in Bottleneck(8, 4, width_factor=3).body.parameters() if p.dim() > 1]
    assert weights == [(4, 8, 1, 1), (12, 4, 3, 3), (16, 12, 1, 1)]


def test_a_wide_network_starts_as_its_shortcuts_alone() -> None:
    wide, plain = wide_resnet(WideResNetSize(50, 4, 2)), bottleneck_resnet(base_channels=4)
    x_BCHW = torch.rand(1, 16, 5, 5)
    assert torch.equal(wide.get_submodule("block1")(x_BCHW), x_BCHW)
    assert not torch.equal(plain.get_submodule("block1")(x_BCHW), x_BCHW)


def test_the_seed_decides_the_weights() -> None:
    def weights(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return list(small_resnet().parameters())

    assert all(map(torch.equal, weights(1), weights(1)))
    assert not all(map(torch.equal, weights(1), weights(2)))


def test_convolutions_are_drawn_to_keep_the_variance() -> None:
    torch.manual_seed(0)
    weight = bottleneck_resnet(base_channels=64).get_parameter("block0.body.3.weight")
    assert weight.std().item() == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (bottleneck_resnet, {"blocks": ()}, r"blocks=\(\): give the number of blocks"),
        (bottleneck_resnet, {"blocks": (2, 0)}, r"blocks\[1\]=0: give an integer from 1 up"),
        (bottleneck_resnet, {"width_factor": 1.5}, r"width_factor=1\.5: give an integer"),
        (wide_resnet, {"size": "3B"}, "size='3B' is not known; choose one of '250M', '500M'"),
        (wide_resnet, {"size": WideResNetSize(49, 8, 2)}, "num_layers=49 .* one of 50, 101, 152"),
        (wide_resnet, {"size": WideResNetSize(50, 0, 2)}, "base_channels=0: give an integer"),
    ],
)
def test_bad_sizes_are_refused(build, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**options)
