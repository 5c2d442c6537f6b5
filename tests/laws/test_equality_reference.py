"""The reference is what plain torch does, or equality with it would prove nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import ALL_MODELS, Model
from tests.reference import Unsplit, chain, split, whole_batch_step


def gradients(modules: list[nn.Module]) -> list[Tensor | None]:
    return [p.grad for module in modules for p in module.parameters()]


@pytest.mark.parametrize("model", ALL_MODELS, ids=repr)
def test_every_model_trains_and_gives_finite_gradients(model: Model) -> None:
    built = model.build()
    unsplit = Unsplit(built.modules, built.forward, num_microbatches=2)
    for inputs, targets in model.batches(5, count=2):
        assert torch.isfinite(unsplit.train_step(inputs, targets, model.loss))
    found = [g for g in gradients(built.modules) if g is not None]
    assert found and all(bool(torch.isfinite(g).all()) for g in found)
    assert any(bool(g.abs().sum() > 0) for g in found)


@pytest.mark.parametrize("model", ALL_MODELS, ids=repr)
def test_the_reference_is_deterministic(model: Model) -> None:
    seen = []
    for _ in range(2):
        built = model.build()
        unsplit = Unsplit(built.modules, built.forward, num_microbatches=2)
        losses = [unsplit.train_step(x, y, model.loss) for x, y in model.batches(4, count=2)]
        seen.append([*losses, *(g for g in gradients(built.modules) if g is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_one_micro_batch_is_plain_autograd() -> None:
    ours, plain = (
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)) for _ in range(2)
    )
    plain.load_state_dict(ours.state_dict())
    x, y = torch.randn(7, 6), torch.randn(7, 3)
    loss = Unsplit(list(ours), chain(3)).train_step(x, y, F.mse_loss)
    expected = F.mse_loss(plain(x), y)
    expected.backward()
    assert torch.equal(loss, expected)
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(_grad(a), _grad(b)), name
    for (name, c), (_, d) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(c, d, rtol=0, atol=1e-7, msg=name)


@pytest.mark.parametrize("num_microbatches", (2, 3, 8))
def test_micro_batches_sum_to_the_whole_batch(num_microbatches: int) -> None:
    ours = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    whole = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    whole.load_state_dict(ours.state_dict())
    x, y = torch.randn(7, 6).double(), torch.randn(7, 3).double()
    loss = Unsplit(list(ours), chain(3), num_microbatches).train_step(x, y, F.mse_loss)
    expected = whole_batch_step(list(whole), chain(3), (x, y), F.mse_loss)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-15)
    for a, b in zip(ours.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-15)


def test_uneven_batches_are_cut_with_the_larger_pieces_first() -> None:
    assert split(torch.zeros(10), 4)[1] == [3, 3, 2, 2]
    assert split(torch.zeros(2), 4)[1] == [1, 1]
    assert split((torch.zeros(3), None, {"n": 7}), 2)[0][1][1:] == (None, {"n": 7})


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
