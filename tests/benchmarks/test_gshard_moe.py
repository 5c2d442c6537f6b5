"""Mixtures of experts: the gate of GShard, its places and its balance, to the letter."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.alpa_paper.gshard import GSHARD_SIZES, GShard, gshard_moe
from benchmarks.alpa_paper.mixture import Mixture, MixtureShape, balance_loss, choose
from penstock.errors import ConfigError
from penstock_recipes.zoo.drawn import Draws, xavier

WIDTH, EXPERTS = 6, 4


def model(**options: Any) -> GShard:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_layers": 4, "width": 8, "num_heads": 2, "num_experts": 3}
    return gshard_moe(**{**sizes, "num_words": 11, "max_length": 9, **options})


def mixture(capacity_factor: float = 1.0, *, random_second: bool = False) -> Mixture:
    torch.manual_seed(0)
    shape = MixtureShape(
        width=WIDTH,
        ff_width=10,
        num_experts=EXPERTS,
        capacity_factor=capacity_factor,
        random_second=random_second,
    )
    return Mixture(shape, Draws(xavier(), xavier()), F.relu)


def of_expert(layer: Mixture, number: int, x_D: Tensor) -> Tensor:
    for part in (layer.experts.widen, layer.experts.narrow):
        x_D = x_D @ part.weight[number] + part.bias[number, 0]
        x_D = x_D.relu() if part is layer.experts.widen else x_D
    return x_D


def position_by_position(layer: Mixture, x_TD: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Do for one group what GShard's algorithm 1 says, in loops; count the dropped as well."""
    gates = (x_TD @ layer.gate.weight.t()).softmax(1)
    result, dropped = torch.zeros_like(x_TD), torch.zeros(len(x_TD), 2)
    filled = [0] * EXPERTS
    best = [
        sorted(range(EXPERTS), key=lambda e: -float(gates.detach()[t, e]))[:2]
        for t in range(len(gates))
    ]
    for choice in (0, 1):
        for t, pair in enumerate(best):
            if filled[pair[choice]] == places:
                dropped[t, choice] = 1
                continue
            filled[pair[choice]] += 1
            weight = gates[t, pair[choice]] / gates[t, pair].sum()
            result[t] += weight * of_expert(layer, pair[choice], x_TD[t])
    return result, dropped


@pytest.mark.parametrize("size", GSHARD_SIZES)
def test_each_size_has_the_parameters_of_its_name(size: str) -> None:
    """The names have two digits, of which 1.3B has lost most of a half: 4 % covers that."""
    with torch.device("meta"):
        parameters = sum(p.numel() for p in gshard_moe(size).parameters())
    number = float(size[:-1]) * (1e6 if size.endswith("M") else 1e9)
    assert parameters == pytest.approx(number, rel=0.04)
    layers, width, _, experts = GSHARD_SIZES[size].values()
    attention = 4 * width**2 + 4 * width + 4 * width
    feed_forward = 2 * 8 * width**2 + 9 * width
    mixtures = layers // 2 * (experts * (feed_forward + width) - width)
    rest = layers * attention + layers // 2 * feed_forward + 32_000 * width + 2 * width
    assert parameters == mixtures + rest + layers // 2 * width


@pytest.mark.parametrize("factor", [0.4, 1.0, 4.0])
def test_a_mixture_is_what_the_paper_says_position_by_position(factor: float) -> None:
    layer, x_BTD = mixture(factor).double(), torch.randn(3, 7, WIDTH, dtype=torch.float64)
    places = math.ceil(factor * 2 * 7 / EXPERTS)
    weights = list(layer.parameters())
    found, _ = layer(x_BTD)
    pairs = [position_by_position(layer, x_TD, places) for x_TD in x_BTD]
    expected, dropped = (torch.stack(part) for part in zip(*pairs, strict=True))
    torch.testing.assert_close(found, expected)
    gradients = torch.autograd.grad(found.square().sum(), weights)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), weights))
    assert bool(dropped.any()) == (factor < 4)


def test_balance_is_1_where_experts_share_and_more_where_they_do_not() -> None:
    even = torch.full((1, EXPERTS, EXPERTS), 1e-6) + torch.eye(EXPERTS) * 1e-3 + 0.25
    one = torch.zeros(1, EXPERTS, EXPERTS)
    one[..., 2] = 1.0
    assert float(balance_loss(even / even.sum(2, True), choose(even)[0])) == pytest.approx(1.0)
    assert float(balance_loss(one, choose(one)[0])) == pytest.approx(EXPERTS)


def test_balance_moves_the_gate_towards_experts_that_are_seldom_chosen() -> None:
    layer = mixture()
    x_BTD = torch.rand(4, 8, WIDTH)
    before = layer(x_BTD)[1]
    for _ in range(50):
        layer.zero_grad()
        layer(x_BTD)[1].backward()
        assert layer.gate.weight.grad is not None
        with torch.no_grad():
            layer.gate.weight -= 0.1 * layer.gate.weight.grad
    assert float(layer(x_BTD)[1].detach()) < float(before.detach()) - 0.05


def test_the_balance_loss_of_all_mixtures_comes_out_in_training_only() -> None:
    whole, words = model(dropout=0.0, random_second=False), torch.randint(11, (2, 9))
    seen: list[Tensor] = []
    for block in whole.blocks[1::2]:
        block.register_forward_hook(lambda *call: seen.append(call[2][1]))
    logits, balance = whole(words)
    assert len(seen) == 2
    assert torch.equal(balance, seen[0] + seen[1])
    assert torch.equal(whole.eval()(words), logits)


def test_chance_has_its_say_on_second_experts_in_training_only() -> None:
    layer, x_BTD = mixture(4.0, random_second=True), torch.randn(4, 8, WIDTH)
    first, again, other = (_seeded(lambda: layer(x_BTD)[0], seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    layer.eval()
    always = mixture(4.0)(x_BTD)[0]
    assert torch.equal(_seeded(lambda: layer(x_BTD)[0], 1), always)
    is_fuller = (first != always).any(2)
    assert 0 < int(is_fuller.sum()) < is_fuller.numel()


def _seeded(compute: Callable[[], Any], seed: int) -> Any:
    torch.manual_seed(seed)
    return compute()


def test_results_are_the_same_to_the_bit_in_every_run() -> None:
    torch.manual_seed(1)
    words = torch.randint(11, (8, 9))
    runs = []
    for _ in range(5):
        whole = model(width=32, capacity_factor=0.7)
        logits, balance = _seeded(partial(whole, words), 2)
        (logits.square().mean() + balance).backward()
        gradients = [p.grad for p in whole.parameters() if p.grad is not None]
        runs.append([logits.detach(), *gradients])
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def test_the_gate_computes_in_float32_under_autocast() -> None:
    layer, x_BTD = mixture(), torch.randn(2, 8, WIDTH)
    expected = layer(x_BTD)[1]
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x_BTD)[1]
    assert found.dtype is torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "380B"}, "size='380B' is not known; choose one of '380M', '690M'"),
        ({"num_experts": 1}, "num_experts=1, but each position goes to two"),
        ({"num_layers": 1}, "num_layers=1, but it is each second layer that has experts"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0: give a number above 0"),
        ({"num_heads": 3}, "width=8 cannot be shared out among num_heads=3"),
    ],
)
def test_sizes_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model(**options)
