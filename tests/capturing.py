"""How captured models are cut and compared in tests."""

import random
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.pytree import flatten

BATCH, MICROBATCHES = 4, 3


def loss(output: Any, _target: Tensor) -> Tensor:
    """Give a number that depends on everything that the model gives."""
    parts = [t for t in flatten(output)[0] if t.is_floating_point() and t.dim()]
    return torch.stack([part.float().square().mean() for part in parts]).sum()


def random_cut(num_layers: int, num_stages: int) -> list[int]:
    draw = random.Random(num_layers * num_stages)
    cuts = sorted(draw.sample(range(1, num_layers), num_stages - 1))
    return [b - a for a, b in pairwise([0, *cuts, num_layers])]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        same = other is value if value is None else other is not None and torch.equal(other, value)
        assert same, name
