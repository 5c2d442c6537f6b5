"""The residual network: a plain Sequential whose sizes are arguments."""

import pytest
import torch
from torch import nn

from penstock_recipes.zoo.resnet import residual_network


@pytest.mark.parametrize("size", [2, 8, 11])
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 5])
def test_any_size_of_image_and_number_of_blocks(size: int, num_blocks: int) -> None:
    model = residual_network(num_blocks, 4, in_channels=3, num_classes=7)
    assert model(torch.randn(2, 3, size, size)).shape == (2, 7)


def test_it_is_a_plain_list_of_named_layers() -> None:
    model = residual_network(num_blocks=2, width=4)
    assert type(model) is nn.Sequential
    assert [name for name, _ in model.named_children()] == (
        [
            *("stem", "stem_norm", "stem_relu", "block0", "block1"),
            *("pool", "flatten", "dropout", "head"),
        ]
    )


def test_the_second_half_has_half_the_resolution_and_twice_the_channels() -> None:
    model = residual_network(num_blocks=4, width=4)
    image = torch.randn(1, 1, 8, 8)
    assert model[:5](image).shape == (1, 4, 8, 8)
    assert model[:6](image).shape == (1, 8, 4, 4)
    assert model[:7](image).shape == (1, 8, 4, 4)


def test_a_block_adds_its_input() -> None:
    block = residual_network(num_blocks=1, width=4)[3]
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    image = torch.rand(2, 4, 5, 5)
    assert torch.equal(block(image), image)
