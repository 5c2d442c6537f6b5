"""Uses beyond a plain step: chained pipelines, tied values, many stages, modes, odd buffers."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from tests.model_parts import Does
from tests.models import BY_NAME, Model, token_loss, tokens, vectors
from tests.reference import Unsplit, chain
from tests.side_by_side import (
    assert_trains_like_unsplit,
    autocast,
    differences,
    pipeline,
    same_bits,
)
from tests.ways import WAYS, in_pairs, one_each

SOME = ("convolutions", "transformer", "multihead", "lstm")


def stack(*sizes: int) -> list[nn.Module]:
    """Give linear layers with dropout between."""
    torch.manual_seed(0)
    pairs = pairwise(sizes)
    return [layer for a, b in pairs for layer in (nn.Linear(a, b), nn.Dropout(0.1))]


@pytest.mark.parametrize("way", WAYS)
def test_two_pipelines_in_a_row(way: dict[str, Any]) -> None:
    x, y = torch.randn(7, 6), torch.randn(7, 3)
    options = {"num_stages": 3, "num_microbatches": 3, "threads_per_stage": 1, **way}
    ours, theirs = ([stack(6, 8, 8), stack(8, 8, 3)] for _ in range(2))
    first, second = (penstock.Pipeline(part, **options) for part in ours)
    F.mse_loss(second(first(x).tanh()), y).backward()
    upper, lower = (Unsplit(part, chain(4), 3) for part in theirs)
    outer = upper.module_forward(x)
    middle = outer.output.tanh()
    leaf = middle.detach().requires_grad_()
    inner = lower.module_forward(leaf)
    F.mse_loss(inner.output, y).backward()
    inner.backward()
    middle.backward(leaf.grad)
    outer.backward()
    assert not differences([*ours[0], *ours[1]], [*theirs[0], *theirs[1]])
    for pipe in (first, second):
        pipe.close()


@pytest.mark.parametrize("way", WAYS)
def test_the_input_may_come_from_other_layers(way: dict[str, Any]) -> None:
    x, y = torch.randn(7, 6), torch.randn(7, 3)
    before, twin_before = nn.Linear(6, 6), nn.Linear(6, 6)
    twin_before.load_state_dict(before.state_dict())
    ours, theirs = stack(6, 8, 3), stack(6, 8, 3)
    pipe = penstock.Pipeline(ours, 3, num_microbatches=3, threads_per_stage=1, **way)
    F.mse_loss(pipe(before(x)), y).backward()
    middle = twin_before(x)
    leaf = middle.detach().requires_grad_()
    Unsplit(theirs, chain(4), 3).module_step(leaf, y, F.mse_loss)
    middle.backward(leaf.grad)
    assert not differences([before, *ours], [twin_before, *theirs])
    pipe.close()


@pytest.mark.parametrize("way, num_microbatches", one_each(WAYS, (1, 3)))
def test_the_output_may_be_changed_in_place(num_microbatches: int, way: dict[str, Any]) -> None:
    x, y = torch.randn(7, 6), torch.randn(7, 3)
    ours, theirs = stack(6, 8, 3)[:3], stack(6, 8, 3)[:3]
    pipe = penstock.Pipeline(
        ours, 3, num_microbatches=num_microbatches, threads_per_stage=1, **way
    )
    F.mse_loss(F.relu(pipe(x), inplace=True), y).backward()
    outstanding = Unsplit(theirs, chain(3), num_microbatches).module_forward(x)
    F.mse_loss(F.relu(outstanding.output, inplace=True), y).backward()
    outstanding.backward()
    assert not differences(ours, theirs)
    pipe.close()


class _WithWeight(nn.Module):  # embed tokens, and give the table itself as a value beside
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids), self.table.weight


@pytest.mark.parametrize("partition, way", one_each(((4,), (1, 3), (2, 2), (1, 1, 1, 1)), WAYS))
def test_a_weight_may_travel_to_another_stage_as_a_value(partition: Any, way: Any) -> None:
    def layers() -> list[Any]:
        return [
            penstock.Layer(_WithWeight(), outputs=("x", "table")),
            penstock.Layer(nn.Linear(8, 8), inputs="x"),
            penstock.Layer(nn.Tanh(), outputs="y"),
            penstock.Layer(Does(lambda x, table: F.linear(x, table)), inputs=("y", "table")),
        ]

    def forward(call: Callable[..., Any], ids: Any) -> Any:
        x, table = call(0, ids)
        return call(3, call(2, call(1, x)), table)

    tied = Model("tied by value", layers, tokens, token_loss, forward)
    assert_trains_like_unsplit(tied, 7, partition=partition, num_microbatches=3, **way)


@pytest.mark.parametrize("way", WAYS)
def test_many_stages_and_many_micro_batches(way: dict[str, Any]) -> None:
    deep = Model("deep", lambda: [nn.Linear(6, 6) for _ in range(12)], vectors, _first_three)
    assert_trains_like_unsplit(deep, 18, steps=2, num_stages=12, num_microbatches=16, **way)


def _first_three(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output[:, :3], target)


@pytest.mark.parametrize("name, way", one_each(SOME, WAYS))
def test_gradients_in_evaluation_mode(name: str, way: dict[str, Any]) -> None:
    model = BY_NAME[name]
    built, twin = model.build(), model.build()
    [(x, y)] = model.batches(7, count=1)
    unsplit = Unsplit(twin.modules, twin.forward, 3)
    for module in twin.modules:
        module.eval()
    with pipeline(model, built, num_stages=3, num_microbatches=3, **way) as pipe:
        pipe.eval()
        assert same_bits(pipe.train_step(x, y), unsplit.train_step(x, y, model.loss))
        assert not differences(built.modules, twin.modules)
        model.loss(pipe(x), y).backward()
        unsplit.module_step(x, y, model.loss)
    assert not differences(built.modules, twin.modules)


@pytest.mark.parametrize("name, way", one_each(SOME, WAYS))
def test_evaluation_in_bfloat16_and_in_inference_mode(name: str, way: dict[str, Any]) -> None:
    model = BY_NAME[name]
    built, twin = model.build(), model.build()
    [(x, y)] = model.batches(7, count=1)
    unsplit = Unsplit(twin.modules, twin.forward, 3)
    with pipeline(model, built, num_stages=3, num_microbatches=3, **way) as pipe:
        with autocast(True):
            assert same_bits(pipe.eval_step(x), unsplit.evaluate(x))
        with torch.inference_mode():
            assert same_bits(pipe.eval_step(x), unsplit.evaluate(x))
        assert same_bits(pipe.train_step(x, y), unsplit.train_step(x, y, model.loss))
    assert not differences(built.modules, twin.modules)


def test_a_loss_that_draws_does_not_depend_on_the_number_of_stages() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(F.dropout(output, 0.5), target)

    model = Model("loss draws", lambda: stack(6, 8, 3), vectors, loss)
    copies = []
    for num_stages, recompute in ((1, penstock.Recompute.NEVER), (3, penstock.Recompute.STAGE)):
        built = model.build()
        options = {"num_stages": num_stages, "num_microbatches": 3, "recompute": recompute}
        with pipeline(model, built, **options) as pipe:
            for x, y in model.batches(7, count=2):
                pipe.train_step(x, y)
        copies.append(built.modules)
    assert not differences(copies[0], copies[1])


class _Sometimes(nn.Module):  # move a buffer, which scales the output, only while `moving`
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.moving = False
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.moving:
            self.scale.mul_(0.9)
        return x * self.scale.clone()


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_that_moves_in_some_steps_is_right_or_refused(way: dict[str, Any]) -> None:
    changing = [_Sometimes(), _Sometimes()]
    ours, theirs = ([nn.Linear(6, 6), layer, nn.Linear(6, 3)] for layer in changing)
    nn.ModuleList(theirs).load_state_dict(nn.ModuleList(ours).state_dict())
    unsplit = Unsplit(theirs, chain(3), 2)
    options = {"loss": F.mse_loss, "num_microbatches": 2, "threads_per_stage": 1, **way}
    pipe = penstock.Pipeline(ours, partition=(2, 1), **options)
    for n in range(6):
        for layer in changing:
            layer.moving = n % 2 == 1
            layer.scale.fill_(1.0)
        nn.ModuleList([*ours, *theirs]).zero_grad()
        batch = vectors(4, torch.Generator().manual_seed(n))
        expected = unsplit.train_step(*batch, F.mse_loss)
        try:
            assert same_bits(pipe.train_step(*batch), expected)
            assert not differences(ours, theirs)
        except penstock.errors.RecomputeError as error:
            assert "buffer 'scale'" in str(error)
    pipe.close()


class _Late(nn.Module):  # make its buffer when it is first called
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if "scale" not in self._buffers:
            self.register_buffer("scale", torch.ones(6))
        scale = self.get_buffer("scale")
        scale.mul_(0.9)
        return self.linear(x) * scale.clone()


@pytest.mark.parametrize("way, cut", one_each(WAYS, ({"partition": (2, 1)}, {"num_stages": 2})))
def test_a_buffer_made_in_the_first_forward_is_right_or_refused(cut: Any, way: Any) -> None:
    model = Model("late", lambda: [nn.Linear(6, 6), _Late(), nn.Linear(6, 3)], vectors, F.mse_loss)
    try:
        assert_trains_like_unsplit(model, 5, num_microbatches=3, **cut, **way)
    except penstock.errors.RecomputeError as error:
        assert "buffer" in str(error)


@pytest.mark.parametrize("way, wrapped, bf16", in_pairs(WAYS, (True, False), (True, False)))
def test_a_frozen_layer_in_evaluation_mode_takes_the_same_fast_path(wrapped, bf16, way) -> None:
    def layers() -> list[Any]:
        encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        frozen = nn.Sequential(encoder) if wrapped else encoder  # a wrapper stays in training mode
        stack = [nn.Embedding(11, 8), frozen, nn.Linear(8, 8), nn.Linear(8, 11)]
        for module in stack[:2]:
            module.requires_grad_(False)
        return stack

    frozen = Model("frozen encoder", layers, tokens, token_loss)
    for partition in ((2, 2), (1, 1, 2)):
        told: dict[str, Any] = {"partition": partition, "num_microbatches": 3, **way}
        assert_trains_like_unsplit(frozen, 7, bf16=bf16, **told)
