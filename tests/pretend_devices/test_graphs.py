"""A step as one CUDA graph has eager's bits, and is never stale."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.schedules import gpipe

from .memory import Memory

WIDTH, NUM_STEPS = 6, 5


def layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]


def piped(modules: list[nn.Module], num_stages: int, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    for module in modules:
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    how: dict[str, Any] = {"num_microbatches": 4, "loss": F.mse_loss, "seed": 3}
    how |= {"devices": ("cuda:0",) * num_stages}
    share, rest = divmod(len(modules), num_stages)
    how["partition"] = [share + (stage < rest) for stage in range(num_stages)]
    return penstock.Pipeline(modules, num_stages, **how | options)


def batch(step: int, num_samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(num_samples, WIDTH, generator=generator)
    y = torch.randn(num_samples, 3, generator=generator)
    return x.to("cuda:0"), y.to("cuda:0")


def train(pipe: penstock.Pipeline, change: Any = None) -> list[Any]:
    found: list[Any] = []
    for step in range(NUM_STEPS):
        x, y = batch(step)
        loss = pipe.train_step(x, y)
        x.zero_()
        found.append((loss * 1).tolist())
        for p in pipe.parameters():
            assert p.grad is not None
            found.append(p.grad.tolist())
            with torch.no_grad():
                p.sub_(0.1 * p.grad)
        pipe.zero_grad()
    return found


@pytest.mark.parametrize("num_stages", (1, 2))
def test_steps_have_eagers_bits(memory: Memory, num_stages: int) -> None:
    with piped(layers(), num_stages, schedule=gpipe) as pipe:
        wanted = train(pipe)
    with piped(layers(), num_stages, schedule=gpipe, cuda_graphs=True) as pipe:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert train(pipe) == wanted
    assert memory.races == []
