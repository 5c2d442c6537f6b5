"""Main weights move as float32 weights would, and come back from a checkpoint to the bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import penstock
from penstock import MainWeights
from penstock.errors import ConfigError
from penstock.optim.main_weights import MAIN
from tests.models import LOW_PRECISION
from tests.reference import Unsplit
from tests.side_by_side import pipeline, same_bits

STEPS, NUM_MICROBATCHES, LIMIT = 4, 3, 0.1
Make = Callable[..., Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": partial(AdamW, lr=1e-3),
    "fused": partial(AdamW, lr=1e-3, fused=True),
    "SGD": partial(SGD, lr=1e-2, momentum=0.9),
    "Adagrad": partial(Adagrad, lr=1e-2),  # it makes its state at once
}
BATCHES = LOW_PRECISION.batches(7, STEPS)


def decayed(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def by_hand(make: Make) -> list[tuple[Tensor, Tensor]]:
    """Train with a float32 twin of each weight; return both in the end."""
    built = LOW_PRECISION.build_unsplit()
    unsplit = Unsplit(built.modules, built.forward, NUM_MICROBATCHES)
    weights = list(nn.ModuleList(built.modules).parameters())
    twins = [nn.Parameter(w.detach().float(), w.requires_grad) for w in weights]
    optimizer = make(twins)
    scheduler = decayed(optimizer)
    for batch in BATCHES:
        unsplit.train_step(*batch, LOW_PRECISION.loss)
        nn.utils.clip_grad_norm_(weights, LIMIT)
        for weight, twin in zip(weights, twins, strict=True):
            twin.grad = weight.grad
        optimizer.step()
        scheduler.step()
        for weight, twin in zip(weights, twins, strict=True):
            weight.data.copy_(twin.data)
            weight.grad = None
    return list(zip(weights, twins, strict=True))


class Trained:
    """A pipeline with main weights, and its learning rate scheduler."""

    def __init__(self, make: Make, num_stages: int) -> None:
        built = LOW_PRECISION.build()
        told = {"num_stages": num_stages, "num_microbatches": NUM_MICROBATCHES}
        self.pipe = pipeline(LOW_PRECISION, built, **told)
        self.weights = list(nn.ModuleList(built.modules).parameters())
        self.optimizer = MainWeights(make, self.pipe.parameters())
        self.scheduler = decayed(self.optimizer)

    def train(self, batches: list[Any]) -> None:
        scaler = penstock.GradScaler(self.pipe, init_scale=2.0**7)
        for batch in batches:
            self.pipe.train_step(*batch, loss_scale=scaler.get_scale())
            scaler.unscale_(self.optimizer)
            penstock.clip_grad_norm_(self.pipe, LIMIT)
            scaler.step(self.optimizer)
            scaler.update()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def check(self, expected: list[tuple[Tensor, Tensor]]) -> None:
        for own, (weight, main) in zip(self.weights, expected, strict=True):
            assert same_bits(own, weight)
            if own.dtype is torch.bfloat16:
                assert same_bits(self.optimizer.state[own][MAIN], main.detach())


@pytest.mark.parametrize("num_stages", (1, 3))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_has_the_bits_of_float32_twins_of_the_weights(name: str, num_stages: int) -> None:
    trained = Trained(OPTIMIZERS[name], num_stages)
    trained.train(BATCHES)
    trained.check(by_hand(OPTIMIZERS[name]))


@pytest.mark.parametrize("as_file", (True, False))
def test_another_number_of_stages_goes_on_from_saved_main_weights(
    as_file: bool, tmp_path: Path
) -> None:
    make = OPTIMIZERS["AdamW"]
    first, second = Trained(make, 3), Trained(make, 2)
    first.train(BATCHES[:2])
    if as_file:
        penstock.save_checkpoint(tmp_path / "saved", first.pipe, first.optimizer)
        penstock.load_checkpoint(tmp_path / "saved", second.pipe, second.optimizer)
    else:
        second.pipe.load_state_dict(first.pipe.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    second.train(BATCHES[2:])
    second.check(by_hand(make))


def weight_of(value: float) -> nn.Parameter:
    return nn.Parameter(torch.full((2,), value, dtype=torch.bfloat16))


def stepped(optimizer: Optimizer, weight: Tensor, count: int) -> None:
    for _ in range(count):
        weight.grad = torch.ones_like(weight)
        optimizer.step()


def test_updates_that_bfloat16_loses_add_up() -> None:
    alone, with_main = weight_of(1.0), weight_of(1.0)
    stepped(SGD([alone], lr=2.0**-12), alone, 64)
    stepped(MainWeights(SGD, [with_main], lr=2.0**-12), with_main, 64)
    assert alone.tolist() == [1.0, 1.0]
    assert with_main.tolist() == [1 - 2.0**-6] * 2


def test_a_weight_that_was_changed_gets_a_new_main_weight_where_it_differs() -> None:
    weight = weight_of(1.0)
    optimizer = MainWeights(SGD, [weight], lr=2.0**-12)
    stepped(optimizer, weight, 1)
    with torch.no_grad():
        weight[1] = 3.0
    stepped(optimizer, weight, 1)
    assert optimizer.state[weight][MAIN].tolist() == [1 - 2.0**-11, 3 - 2.0**-12]


def test_a_closure_computes_gradients_once() -> None:
    weight, losses = weight_of(1.0), []

    def closure() -> Tensor:
        loss = (weight * 2).sum()
        loss.backward()
        losses.append(loss)
        return loss

    assert MainWeights(SGD, [weight], lr=0.25).step(closure) is losses[0]
    assert len(losses) == 1
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("make", "words"),
    (
        (SGD([weight_of(1.0)], lr=0.1), r"make=.*give a class such as torch\.optim\.AdamW"),
        (torch.optim.LBFGS, "one gradient per step"),
        (lambda params: params, "one gradient per step"),
    ),
)
def test_other_things_than_makers_of_optimizers_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MainWeights(make, [weight_of(1.0)])
