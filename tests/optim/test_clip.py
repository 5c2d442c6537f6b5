"""Clipping has the bits of torch's on the unsplit model, whatever K is."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipeline
from penstock.errors import ConfigError
from tests.distributed.call import call

INF = float("inf")


class Turned(nn.Module):
    """Has a complex weight, and one of another type than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(9, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.turn).real + (x * self.wide).float()


def model(*, of_one_type: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    kind = nn.Identity if of_one_type else Turned
    of = [nn.Linear(9, 9), kind(), nn.LayerNorm(9), nn.Linear(9, 9), kind(), nn.Linear(9, 9)]
    return nn.Sequential(*of)


def batches() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 9, generator=drawn), torch.randn(8, 9, generator=drawn))] * 3


def trained(module: nn.Module, pipe: Pipeline, clip: Any) -> list[Tensor]:
    """Train for three clipped steps; return the norms, and the weights in the end."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    found = []
    for batch in batches():
        pipe.train_step(*batch)
        found.append(clip())
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach() for p in module.parameters())]


def by_torch(*, of_one_type: bool = False, **how: Any) -> list[Tensor]:
    unsplit = model(of_one_type=of_one_type)
    pipe = Pipeline(unsplit, 1, num_microbatches=2, loss=nn.MSELoss())
    return trained(
        unsplit, pipe, lambda: nn.utils.clip_grad_norm_(unsplit.parameters(), 0.1, **how)
    )


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


HOW: list[dict[str, Any]] = [
    {"norm_type": norm, "foreach": each}
    for norm, each in product((2.0, 1.0, 3.0, 0.5, INF), (None, False))
]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_clipped_steps_have_the_bits_of_torchs(num_stages: int, how: dict[str, Any]) -> None:
    pipe = Pipeline(model(), num_stages, num_microbatches=2, loss=nn.MSELoss())
    found = trained(pipe, pipe, lambda: penstock.clip_grad_norm_(pipe, 0.1, **how))
    assert same(found, by_torch(**how))


def in_processes(mesh: penstock.Mesh) -> dict[str, Any]:
    layers = model(of_one_type=True)
    pipe = Pipeline(layers, mesh=mesh, num_microbatches=2, loss=nn.MSELoss())
    found = trained(pipe, pipe, lambda: penstock.clip_grad_norm_(pipe, 0.1))
    own = dict(zip([name for name, _ in pipe.named_parameters()], found[3:], strict=True))
    return {"norms": found[:3], "weights": own}


def test_clipped_steps_in_processes_have_them_too(tmp_path: Path) -> None:
    wanted = by_torch(of_one_type=True)
    names = [name for name, _ in model(of_one_type=True).named_parameters()]
    weights = dict(zip(names, wanted[3:], strict=True))
    every = call(in_processes, (3, 1), tmp_path)
    assert sorted(name for found in every for name in found["weights"]) == sorted(weights)
    for found in every:
        assert same(found["norms"], wanted[:3])
        assert all(torch.equal(value, weights[name]) for name, value in found["weights"].items())


def after_a_step(worst: float) -> tuple[Pipeline, list[Any]]:
    """Give a pipeline with one gradient set to `worst`, and a copy of all gradients."""
    pipe = Pipeline(model(), 2, num_microbatches=2, loss=nn.MSELoss())
    pipe.train_step(*batches()[0])
    first = next(pipe.parameters())
    assert first.grad is not None
    first.grad[0, 0] = worst
    return pipe, [copy.deepcopy(p.grad) for p in pipe.parameters()]


def test_a_norm_that_is_not_finite_can_be_an_error_and_changes_nothing() -> None:
    pipe, before = after_a_step(INF)
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 of the gradients is inf"):
        penstock.clip_grad_norm_(pipe, 1.0, error_if_nonfinite=True)
    after: list[Any] = [p.grad for p in pipe.parameters()]
    assert all(a is not None and a.equal(b) for a, b in zip(before, after, strict=True))
    assert penstock.clip_grad_norm_(pipe, 1.0) == INF


@pytest.mark.parametrize("worst", [2.0, INF])
def test_a_norm_without_limit_is_measured_and_changes_nothing(worst: float) -> None:
    pipe, before = after_a_step(worst)
    norm = penstock.clip_grad_norm_(pipe, INF)
    assert same([p.grad for p in pipe.parameters() if p.grad is not None], before)
    assert norm.equal(nn.utils.clip_grad_norm_(pipe.parameters(), 0.1))


def test_no_gradient_has_the_norm_0() -> None:
    assert penstock.clip_grad_norm_(Pipeline(model(), 2, num_microbatches=1), 1.0) == 0


@pytest.mark.parametrize("name", ["max_norm", "norm_type"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_what_is_not_above_0_is_refused(name: str, value: float) -> None:
    pipe = Pipeline(model(), 1, num_microbatches=1)
    with pytest.raises(ConfigError, match=f"{name}={value}; it must be above 0"):
        penstock.clip_grad_norm_(pipe, *((value,) if name == "max_norm" else (1.0, value)))
