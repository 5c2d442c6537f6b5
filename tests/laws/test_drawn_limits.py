"""Drawn lists of layers with views and changes in place train under a limit of memory as in torch,
or are refused in Penstock's words.
"""

import copy
import random

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline, schedules
from penstock.errors import PenstockError


class Viewed(nn.Module):  # gives another view of what it is given
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        views = {"whole": x[:], "turned": x.t().t(), "same": x.view_as(x), "cut": x[:, :8]}
        return views[self.kind]


class Added(nn.Module):  # adds in place to what it is given, or to a copy of it
    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.copies, self.weight = copies, nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if self.copies else x
        return x.add_(self.weight)


def drawn(seed: int) -> nn.Sequential:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kinds = [lambda: nn.Linear(8, 8), lambda: nn.LayerNorm(8), nn.Identity]
    kinds += [lambda: nn.Dropout(0.0, inplace=draw.random() < 0.5)]
    kinds += [lambda: nn.ReLU(inplace=draw.random() < 0.7), lambda: nn.Hardtanh(inplace=True)]
    kinds += [lambda: nn.Sequential(nn.Identity(), nn.LeakyReLU(inplace=True)), nn.Flatten]
    kinds += [lambda: Viewed(draw.choice(["whole", "turned", "same", "cut"]))]
    kinds += [lambda: Added(copies=draw.random() < 0.5), lambda: nn.BatchNorm1d(8)]
    count = draw.randint(3, 9)
    return nn.Sequential(*(draw.choice(kinds)() for _ in range(count)), nn.Linear(8, 3))


def trained(seed: int) -> str:
    draw, layers, unsplit = random.Random(f"how {seed}"), drawn(seed), drawn(seed)
    num_stages, parts = draw.randint(1, min(3, len(layers))), draw.randint(1, 3)
    limit = draw.choice([200, 2_000, 20_000, 10**6])
    x, y = torch.randn(6, 8), torch.randn(6, 3)
    given = x.clone().requires_grad_(draw.random() < 0.3)
    try:  # what torch itself refuses
        for own, of in zip(copy.deepcopy(given).chunk(parts), y.chunk(parts), strict=True):
            nn.functional.mse_loss(unsplit(own.clone()), of).backward()
    except RuntimeError:
        return "torch refuses it"
    try:
        pipe = Pipeline(
            layers,
            num_stages,
            num_microbatches=parts,
            loss=nn.MSELoss(),
            memory_limit_bytes=limit,
            example_inputs=x if draw.random() < 0.5 else None,
            schedule=draw.choice([schedules.gpipe, schedules.one_f_one_b, schedules.zb_h1()]),
            offload=draw.random() < 0.3,
        )
        with pipe:
            pipe.train_step(given, y)
    except PenstockError as error:
        return type(error).__name__
    norms = any(isinstance(m, nn.BatchNorm1d) for m in layers.modules())  # of whole batches
    for ours, theirs in zip(layers.parameters(), unsplit.parameters(), strict=True):
        if theirs.grad is None or norms:
            continue
        assert ours.grad is not None, seed
        assert torch.allclose(ours.grad * parts, theirs.grad, atol=1e-5), seed
    return "equal"


def check(seeds: range) -> None:
    found = [trained(seed) for seed in seeds]
    assert {*found} <= {"equal", "ConfigError", "PlanError", "torch refuses it"}, found
    assert found.count("equal") > len(found) / 3


@pytest.mark.filterwarnings("ignore::penstock.errors.ExecutionWarning")
def test_a_few_drawn_cases_train_or_are_refused_in_our_words() -> None:
    check(range(40))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::penstock.errors.ExecutionWarning")
@pytest.mark.parametrize("part", range(6))
def test_600_drawn_cases_train_or_are_refused_in_our_words(part: int) -> None:
    check(range(1000 + 100 * part, 1100 + 100 * part))
