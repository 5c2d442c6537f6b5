"""What a profile says is what the layers do, and making it leaves no trace."""

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.costs.measuring.measure import repeats_within
from penstock.costs.measuring.step_timer import StepTimer
from penstock.errors import ConfigError
from penstock.model.capture.capture import resolve_layers
from penstock.runtime.profiling import divided_backward
from penstock_recipes.optim.optimizers import Adafactor


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 2)
    )


def test_measured_layers_have_seconds_and_the_counted_ones_their_operators() -> None:
    found = penstock.profile(
        model(), torch.randn(6, 4), loss=mse_loss, targets=torch.randn(6, 2), threads=1
    )
    assert (found.measured_on, found.threads, found.name) == ("core", 1, "Sequential")
    (size,) = found.sizes
    assert size.microbatch_size == 6
    for n in (0, 1, 3, 4):
        seconds = size.layer(n).seconds
        assert seconds is not None
        assert min(seconds.forward_s, seconds.recompute_s, seconds.backward_s) > 0
        assert seconds.input_s > 0
        assert (seconds.weight_s > 0) == (n != 1)  # only products leave gradients for later
    assert [size.layer(n).draws for n in range(5)] == [False, False, True, False, False]
    assert size.loss is not None
    assert size.loss.seconds is not None
    assert size.loss.seconds.backward_s > 0
    counted = penstock.profile(model(), torch.randn(6, 4), measure=False, torch_type="cpu")
    assert counted.measured_on is None
    assert counted.sizes[0].loss is None
    for n in range(5):
        assert counted.sizes[0].layer(n).operators == size.layer(n).operators


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, took: tuple[float, float]) -> Tensor:
        ctx.backward_s = took[1]
        time.sleep(took[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None


class Waits(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.took = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Wait.apply(x * self.weight, self.took)
        return found


def test_each_part_of_a_step_has_its_own_seconds() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), Waits(0.003, 0.009))
    seconds = penstock.profile(layers, torch.randn(2, 4), torch_type="cpu").sizes[0].layer(1)
    assert seconds.seconds is not None
    for name, least_s in (
        *(("forward_s", 0.003), ("recompute_s", 0.003)),
        *(("backward_s", 0.009), ("input_s", 0.009)),
    ):
        assert getattr(seconds.seconds, name) >= least_s
    assert seconds.seconds.weight_s == 0


def test_all_is_as_before() -> None:
    layers = model()
    layers[0].weight.grad = torch.ones(8, 4)
    calls: list[str] = []
    weight: Any = layers[3].weight
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("added"))
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    inputs = torch.randn(6, 4)
    random = torch.get_rng_state()
    for measure in (True, False):
        penstock.profile(layers, inputs, measure=measure, busy=measure)
        after = layers.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert torch.equal(random, torch.get_rng_state())
        assert torch.equal(layers[0].weight.grad, torch.ones(8, 4))
        assert [p.grad is None for p in layers.parameters()] == [False, *[True] * 7]
        assert calls == []


def test_micro_batches_are_the_first_samples_or_all_of_them_again() -> None:
    seen: list[Tensor] = []

    class Sees(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not x.is_meta:
                seen.append(x.detach().clone())
            return super().forward(x)

    inputs = torch.arange(12.0).reshape(3, 4)
    found = penstock.profile(nn.Sequential(Sees(4, 4)), inputs, microbatch_sizes=[5, 2])
    assert [size.microbatch_size for size in found.sizes] == [2, 5]
    assert [value.num_bytes for value in found.sizes[1].values] == [5 * 16] * 2
    assert torch.equal(seen[0], inputs[:2])
    assert torch.equal(seen[-1], inputs[[0, 1, 2, 0, 1]])


@pytest.mark.parametrize(
    ("optimizer", "tensors"),
    [(torch.optim.AdamW, 2), (torch.optim.SGD, 0), (Adafactor, None)],
)
def test_weights_are_counted_once_with_what_the_optimizer_keeps(
    optimizer: Any, tensors: int | None
) -> None:
    layers = [nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)]
    layers[2].weight = layers[0].weight
    layers[1].weight.requires_grad_(False)
    found = penstock.profile(
        nn.Sequential(*layers), torch.randn(3, 4), measure=False, optimizer=optimizer
    )
    first, norm, tied = found.weights
    assert (first.parameter_bytes, norm.parameter_bytes, tied.parameter_bytes) == (64, 32, 0)
    assert (first.gradient_bytes, norm.gradient_bytes) == (64, 16)
    assert norm.buffer_bytes == 16 + 16 + 8
    if tensors is None:
        assert first.optimizer_bytes == 4 * (4 + 4)
    else:
        assert first.optimizer_bytes - 64 * tensors in (0, 4)  # the number of the step
    assert tied.optimizer_bytes == 0


def test_a_model_without_values_is_counted_and_not_measured() -> None:
    with torch.device("meta"):
        huge = nn.Sequential(*(nn.Linear(60_000, 60_000) for _ in range(30)))
    found = penstock.profile(huge, torch.randn(2, 60_000), measure=False)
    assert sum(of.parameter_bytes for of in found.weights) > 400e9
    assert len(found.sizes[0].kinds) < 5
    with pytest.raises(ConfigError, match="on the meta device, without values"):
        penstock.profile(huge, torch.randn(2, 60_000))


def test_any_module_can_be_profiled() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) + y
            return x

    inputs = torch.randn(3, 4), torch.randn(3, 4)
    found = penstock.profile(Skips(), inputs, microbatch_sizes=[3])
    assert (found.name, len(found.layers)) == ("Skips", 3)
    assert found.sizes[0].layer(0).seconds is not None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"microbatch_sizes": [0]}, "microbatch_sizes=0"), ({"threads": 0}, "threads=0")],
)
def test_arguments_that_cannot_work_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        penstock.profile(model(), torch.randn(2, 4), **wrong)


@pytest.mark.parametrize(
    ("budget_s", "measure", "sizes"),
    [(None, True, [1, 2, 8]), (1e9, True, [1, 2, 8]), (0.0, True, [1]), (0.0, False, [1, 2, 8])],
)
def test_a_budget_leaves_out_larger_sizes_that_are_to_be_measured(
    budget_s: float | None, measure: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.profiling.THOROUGH", repeats_within(0.0))
    found = penstock.profile(
        [nn.Linear(4, 4), nn.Tanh()],
        torch.randn(8, 4),
        microbatch_sizes=[8, 2, 1],
        measure=measure,
        budget_s=budget_s,
    )
    assert [size.microbatch_size for size in found.sizes] == sizes
    assert all((kind.seconds is not None) == measure for kind in found.sizes[-1].kinds)


@pytest.mark.parametrize("divide", [None, divided_backward])
def test_one_of_equal_layers_runs_backward_in_each_run(divide: Any) -> None:
    backwards: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            y.register_hook(lambda grad: backwards.append(id(self)))
            return y

    layers = [Counting(4, 4) for _ in range(3)]
    timer = StepTimer(resolve_layers(layers, torch.ones(2, 4)), divide=divide)
    turns = []
    for _ in layers:
        backwards.clear()
        timer.run(torch.ones(2, 4))
        turns.append({*backwards})
    first, second, third = map(id, layers)  # the input of the first one wants no gradient
    assert turns == [{first, second}, {first, third}, {first, second}]


@pytest.mark.parametrize(
    ("optimizer", "moves"),
    [
        (torch.optim.SGD, 3),  # reads weight and gradient, writes the weight
        (partial(torch.optim.SGD, momentum=0.9), 3 + 5),  # decays the sum, adds the gradient
        (torch.optim.AdamW, 20),
        (partial(torch.optim.AdamW, fused=True), 7),  # weight, two moments; reads the gradient
    ],
    ids=["SGD", "momentum", "AdamW", "fused"],
)
def test_bytes_that_an_optimizer_moves_are_those_of_its_operators(
    optimizer: Any, moves: int
) -> None:
    with torch.device("meta"):
        layer, inputs = nn.Linear(256, 256, bias=False), torch.zeros(4, 256)
    found = penstock.profile([layer], inputs, measure=False, optimizer=optimizer).weights[0]
    assert found.moved_bytes / found.parameter_bytes == pytest.approx(moves, rel=1e-3)
