"""Losses are weighted to sum to the whole batch's, for any reduction; no tokens have no part."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from tests.reference import Loss, Unsplit, Weigh, chain, mean, shares_of, total, whole_batch_step
from tests.ways import named_schedules, one_each, pairwise

PADDING = 0


def layers() -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11)]


def padded(num_samples: int) -> tuple[Tensor, Tensor]:
    """Give token ids and targets; sample n has 1 + n % 5 real targets, then padding."""
    generator = torch.Generator().manual_seed(num_samples)
    ids = torch.randint(1, 11, (num_samples, 6), generator=generator)
    targets = ids.roll(1, dims=1)
    for n in range(num_samples):
        targets[n, 1 + n % 5 :] = PADDING
    return ids, targets


def token_mean(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), targets, ignore_index=PADDING)


def token_sum(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.transpose(1, 2), targets, ignore_index=PADDING, reduction="sum")


def sample_mean(scores: Tensor, targets: Tensor) -> Tensor:
    return token_sum(scores, targets) / len(targets)


def as_tensor(targets: Tensor) -> Tensor:
    return (targets != PADDING).sum()


def as_float(targets: Tensor) -> float:
    return float(as_tensor(targets))


def as_int(targets: Tensor) -> int:
    return int(as_tensor(targets))


REDUCTIONS = [
    pytest.param(sample_mean, penstock.Reduction.MEAN, mean, id="mean"),
    pytest.param(token_sum, penstock.Reduction.SUM, total, id="sum"),
    pytest.param(token_mean, as_tensor, shares_of(as_tensor), id="tokens-tensor"),
    pytest.param(token_mean, as_float, shares_of(as_float), id="tokens-float"),
    pytest.param(token_mean, as_int, shares_of(as_int), id="tokens-int"),
]
SIZES = [(6, 3), (7, 3), (11, 4), (3, 8), (1, 2), (9, 1)]


def step(loss: Loss, modules: list[nn.Module], batch: Any, **options: Any) -> Tensor:
    with penstock.Pipeline(modules, loss=loss, threads_per_stage=1, **options) as pipe:
        result = pipe.train_step(*batch)
    assert isinstance(result, Tensor) and result.dim() == 0 and not result.requires_grad
    return result


def gradients(modules: list[nn.Module]) -> list[Tensor]:
    found = [p.grad for p in nn.ModuleList(modules).parameters() if p.grad is not None]
    assert len(found) == len([*nn.ModuleList(modules).parameters()])
    return found


def assert_equal_gradients(ours: list[nn.Module], theirs: list[nn.Module]) -> None:
    assert all(map(torch.equal, gradients(ours), gradients(theirs)))


def assert_close_gradients(ours: list[nn.Module], theirs: list[nn.Module], within: float) -> None:
    for a, b in zip(gradients(ours), gradients(theirs), strict=True):
        assert_close(a, b, within)


@pytest.mark.parametrize(
    "loss, reduction, weigh, num_samples, num_microbatches, schedule",
    one_each(
        [
            pytest.param(*reduction.values, *size, id=f"{reduction.id}-{size[0]}-{size[1]}")
            for reduction, size in product(REDUCTIONS, SIZES)
        ],
        named_schedules(),
    ),
)
def test_weighted_losses_equal_the_unsplit_ones_in_every_bit(
    loss: Loss,
    reduction: Any,
    weigh: Weigh,
    num_samples: int,
    num_microbatches: int,
    schedule: Any,
) -> None:
    ours, theirs, batch = layers(), layers(), padded(num_samples)
    expected = Unsplit(theirs, chain(5), num_microbatches, weigh).train_step(*batch, loss)
    options = {"num_microbatches": num_microbatches, "reduction": reduction, "schedule": schedule}
    assert torch.equal(step(loss, ours, batch, num_stages=3, **options), expected)
    assert_equal_gradients(ours, theirs)


@pytest.mark.parametrize(
    "loss, reduction, weigh, num_samples, num_microbatches, dtype, tolerance",
    pairwise(
        REDUCTIONS,
        [pytest.param(*size, id=f"{size[0]}-{size[1]}") for size in SIZES],
        [
            pytest.param(torch.float32, 1e-6, id="float32"),
            pytest.param(torch.float64, 1e-14, id="float64"),
        ],
    ),
)
def test_weighted_losses_sum_to_the_whole_batch(  # noqa: PLR0913 - one law, all its factors
    loss: Loss, reduction: Any, weigh: Weigh, num_samples: int, num_microbatches: int,
    dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    ours, theirs = ([m.to(dtype) for m in layers()] for _ in range(2))
    batch = padded(num_samples)
    expected = whole_batch_step(theirs, chain(5), batch, loss)
    found = step(
        loss, ours, batch, num_stages=2, num_microbatches=num_microbatches, reduction=reduction
    )
    assert_close(found, expected, tolerance)
    assert_close_gradients(ours, theirs, tolerance)


@pytest.mark.parametrize("num_microbatches", (2, 3, 6))
def test_a_micro_batch_without_a_single_token_adds_nothing(num_microbatches: int) -> None:
    ids, targets = padded(6)
    targets[:3] = PADDING  # a mean over no tokens is 0 / 0, the whole batch's is well defined
    ours, theirs = layers(), layers()
    expected = whole_batch_step(theirs, chain(5), (ids, targets), token_mean)
    options = {"num_stages": 2, "num_microbatches": num_microbatches, "reduction": as_tensor}
    found = step(token_mean, ours, (ids, targets), **options)
    assert_close(found, expected, 1e-6)
    assert_close_gradients(ours, theirs, 1e-6)


@pytest.mark.parametrize("value", (0, -1, float("nan"), float("inf")))
def test_weights_that_cannot_be_shares_are_refused_before_any_gradient(value: float) -> None:
    modules = layers()
    with pytest.raises(penstock.errors.BatchError, match=r"non-negative|the weight 0"):
        options: dict[str, Any] = {"num_stages": 2, "num_microbatches": 2}
        step(token_mean, modules, padded(4), reduction=lambda t: value, **options)
    assert all(p.grad is None for p in nn.ModuleList(modules).parameters())


@pytest.mark.parametrize("scale", (0.1, 1000.0))
def test_any_scale_of_weights_gives_the_same_shares(scale: float) -> None:
    batch = padded(7)
    found = [
        step(token_mean, layers(), batch, num_stages=2, num_microbatches=3, reduction=weight)
        for weight in (as_float, _scaled(scale))
    ]
    assert_close(found[0], found[1], 1e-6)


def _scaled(scale: float) -> Callable[[Tensor], float]:
    return lambda target: scale * as_float(target)


def assert_close(a: Tensor | None, b: Tensor | None, tolerance: float) -> None:
    """Compare relative to the largest value, so that a small gradient is not held to be right."""
    assert a is not None and b is not None
    assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


class Labelled(nn.Module):  # compute a loss from labels, where -100 stands for no token
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return {"loss": F.cross_entropy(x, labels), "logits": x}


@pytest.mark.parametrize("labels", ([1, 2, -100, -100], [-100, -100, 1, 2]), ids=str)
@pytest.mark.parametrize("recompute", penstock.Recompute)
def test_the_loss_of_a_models_own_is_that_of_the_real_tokens(labels, recompute) -> None:
    torch.manual_seed(0)
    model = Labelled()
    batch = {"x": torch.randn(4, 6), "labels": torch.tensor(labels)}
    real = {name: value[batch["labels"] != -100] for name, value in batch.items()}
    expected = model(**real)["loss"]
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    example = {"x": batch["x"], "labels": torch.zeros(4, dtype=torch.int64)}
    options: dict[str, Any] = {"example_inputs": example, "num_microbatches": 2}
    options |= {"reduction": lambda batch: (batch["labels"] != -100).sum(), "recompute": recompute}
    options |= {"threads_per_stage": 1}
    with penstock.Pipeline(model, 2, **options) as pipe:
        assert torch.equal(pipe.eval_step(batch)["loss"], expected)
        loss = pipe(batch)["loss"]
        assert torch.equal(loss, expected)
        loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, gradient)
