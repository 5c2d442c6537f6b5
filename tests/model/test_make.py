"""Layers built on the meta device get values where they run, and nothing real is lost."""

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.model.layer_list import as_layers
from penstock.model.materialize import move_or_make

CPU = torch.device("cpu")


def made(build: type[nn.Module], number: int = 0, seed: int = 0) -> nn.Module:
    with torch.device("meta"):
        layers = as_layers([*[nn.Identity() for _ in range(number)], build()])
    move_or_make(layers.steps[number], CPU, seed)
    return layers.steps[number].module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)


def test_values_depend_on_the_seed_and_the_layers_number_only() -> None:
    one, same = made(Block, 3).state_dict(), made(Block, 3).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert all(value.isfinite().all() for value in one.values())
    assert torch.equal(one["norm.running_var"], torch.ones(8))
    assert not torch.equal(one["linear.weight"], made(Block, 2).state_dict()["linear.weight"])
    assert not torch.equal(
        one["linear.weight"], made(Block, 3, seed=1).state_dict()["linear.weight"]
    )


class HalfReal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        with torch.device("cpu"):
            self.pretrained = nn.Linear(4, 4)
            nn.init.constant_(self.pretrained.weight, 0.5)


def test_what_is_real_already_keeps_its_values() -> None:
    module = made(HalfReal)
    assert isinstance(module, HalfReal)
    assert torch.equal(module.pretrained.weight, torch.full((4, 4), 0.5))
    assert module.linear.weight.isfinite().all()


class Masked(nn.Module):  # its reset_parameters forgets the mask
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.mask: Tensor
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class WithoutReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))


@pytest.mark.parametrize("kind", (Masked, WithoutReset))
def test_a_tensor_that_nothing_gives_a_value_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(ConfigError, match=f"its {kind.__name__} has no reset_parameters"):
        made(kind)
