"""Clipping has the bits of torch's on the unsplit model, whatever K is.

In processes too: see the norms of tests/distributed/test_equality_processes.py.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from benchmarks.all_pairs import all_pairs
from penstock import Pipeline
from penstock.errors import ConfigError

INF = float("inf")


class Turned(nn.Module):
    """Has a complex weight, and one of another type than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(9, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.turn).real + (x * self.wide).float()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    of = [nn.Linear(9, 9), Turned(), nn.LayerNorm(9), nn.Linear(9, 9), Turned(), nn.Linear(9, 9)]
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


def by_torch(**how: Any) -> list[Tensor]:
    unsplit = model()
    pipe = Pipeline(unsplit, 1, num_microbatches=2, loss=nn.MSELoss())
    return trained(
        unsplit, pipe, lambda: nn.utils.clip_grad_norm_(unsplit.parameters(), 0.1, **how)
    )


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


CASES = all_pairs([(1, 2, 4), (2.0, 1.0, 3.0, 0.5, INF), (None, False)])


@pytest.mark.parametrize(("num_stages", "norm_type", "foreach"), CASES)
def test_clipped_steps_have_the_bits_of_torchs(
    num_stages: int, norm_type: float, foreach: bool | None
) -> None:
    how: dict[str, Any] = {"norm_type": norm_type, "foreach": foreach}
    pipe = Pipeline(model(), num_stages, num_microbatches=2, loss=nn.MSELoss())
    found = trained(pipe, pipe, lambda: penstock.clip_grad_norm_(pipe, 0.1, **how))
    assert same(found, by_torch(**how))


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
