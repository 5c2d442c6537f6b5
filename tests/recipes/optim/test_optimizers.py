"""RMSProp and the running average do what their formulas say."""

import math

import pytest
import torch
from torch import nn

from penstock_recipes.optim.averaging import Averaging
from penstock_recipes.optim.optimizers import Adafactor, RMSProp


def test_rmsprop_by_hand() -> None:
    weight = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    optimizer = RMSProp([weight], lr=0.5, decay=0.9, momentum=0.8, eps=0.1, weight_decay=0.01)
    square, buffer, expected = 1.0, 0.0, 2.0
    for grad in (3.0, -1.0, 0.5):
        weight.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
        decayed = grad + 0.01 * expected
        square = 0.9 * square + 0.1 * decayed**2
        buffer = 0.8 * buffer + 0.5 * decayed / math.sqrt(square + 0.1)
        expected -= buffer
        assert weight.item() == pytest.approx(expected, rel=1e-12)


def test_rmsprop_leaves_what_has_no_gradient() -> None:
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = RMSProp(weights, lr=0.1)
    weights[0].grad = torch.ones(2)
    optimizer.step()
    assert not torch.equal(weights[0], torch.ones(2))
    assert torch.equal(weights[1], torch.ones(2)) and weights[1] not in optimizer.state


def test_the_average_follows_the_weights_more_slowly_as_steps_go_by() -> None:
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    averaging = Averaging(optimizer, 0.9)
    expected = None
    for step in range(200):
        averaging.step = step
        weight.grad = torch.tensor(-1.0, dtype=torch.float64)
        optimizer.step()
        decay = min(0.9, (1 + step) / (10 + step))
        value = float(step + 1)
        expected = value if expected is None else decay * expected + (1 - decay) * value
    with averaging.in_place():
        assert weight.item() == pytest.approx(expected, rel=1e-12)
    assert weight.item() == 200.0


def test_running_statistics_are_averaged_with_the_weight_of_their_layer() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaging = Averaging(optimizer, 0.9, model.modules())
    norm, seen = model[0], []
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_var is not None
    for step in range(3):
        averaging.step = step
        model(torch.randn(8, 2)).sum().backward()
        optimizer.step()
        seen.append(norm.running_var.clone())
    expected = seen[0]
    for step, variance in enumerate(seen[1:], start=1):
        expected = expected.lerp(variance, 1 - (1 + step) / (10 + step))
    newest = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with averaging.in_place():
        assert torch.equal(norm.running_var, expected)
        assert torch.equal(model.state_dict()["1.running_var"], newest["1.running_var"])
    assert all(torch.equal(newest[name], t) for name, t in model.state_dict().items())
    assert not torch.equal(expected, newest["0.running_var"])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Adafactor, RMSProp])
def test_an_average_does_not_change_the_steps(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    plain, averaged = nn.Linear(3, 2), nn.Linear(3, 2)
    averaged.load_state_dict(plain.state_dict())
    optimizers = [kind(m.parameters(), lr=0.01) for m in (plain, averaged)]  # type: ignore[call-arg]
    averaging = Averaging(optimizers[1], 0.5)
    for step in range(5):
        inputs = torch.randn(4, 3)
        averaging.step = step
        for model, optimizer in zip((plain, averaged), optimizers, strict=True):
            optimizer.zero_grad()
            if step == 2:  # nothing moves in this one
                continue
            model(inputs).square().sum().backward()
            optimizer.step()
    assert all(map(torch.equal, plain.parameters(), averaged.parameters()))


def test_weights_return_after_an_error() -> None:
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    averaging = Averaging(optimizer, 0.9)
    for _ in range(3):
        weight.grad = torch.ones(())
        optimizer.step()
    with pytest.raises(ValueError, match="within"), averaging.in_place():
        raise ValueError("within")
    assert weight.item() == -3.0


@pytest.mark.parametrize("shape", [(), (5,), (4, 6), (2, 3, 4)])
def test_adafactor_is_torchs_as_long_as_that_does_what_it_is_told(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    start = torch.linspace(-1, 1, 24)[: math.prod(shape)].reshape(shape)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizers = [
        Adafactor([ours], lr=0.02, clip=1.0, weight_decay=0.1),
        torch.optim.Adafactor([theirs], lr=0.02, d=1.0, weight_decay=0.1, eps=(1e-30, 1e-3)),
    ]
    for _ in range(6):
        grad = torch.randn(shape)
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = grad.clone()
            optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_adafactor_moves_by_the_learning_rate_late_in_a_run() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = Adafactor([weight], lr=0.015)
    weight.grad = torch.ones(3, 3)
    optimizer.step()
    optimizer.state[weight]["step"] = 39_999
    before = weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - weight, 0.015 * before, rtol=1e-4, atol=0)
