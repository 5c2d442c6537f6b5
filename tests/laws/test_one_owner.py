"""Outside the values between stages, or in place in them: of one stage only, or refused."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.errors import BoundaryError
from penstock.schedules import gpipe
from tests.laws.test_equality_or_refusal import model
from tests.model_parts import Does
from tests.models import drawn, vectors
from tests.reference import Unsplit, chain
from tests.side_by_side import assert_trains_like_unsplit, differences, same_bits
from tests.ways import WAYS, one_each

WITH_RECOMPUTE = [way for way in WAYS if way.values[0]["recompute"] is penstock.Recompute.STAGE]  # type: ignore[index]


def stack() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)]


def penalised(modules: list[nn.Module]) -> Any:
    parameters = [p for module in modules for p in module.parameters()]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + 1e-2 * sum((p * p).sum() for p in parameters)

    return loss


def options(way: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"num_microbatches": 3, "threads_per_stage": 1, **way, **more}


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_over_all_weights_is_exact_in_one_stage_and_refused_in_several(way: Any) -> None:
    ours, theirs = stack(), stack()
    with penstock.Pipeline(ours, 1, loss=penalised(ours), **options(way)) as pipe:
        found = pipe.train_step(*drawn(7))
    assert same_bits(found, Unsplit(theirs, chain(4), 3).train_step(*drawn(7), penalised(theirs)))
    assert not differences(ours, theirs)
    with (
        penstock.Pipeline(ours, 2, loss=penalised(ours), **options(way)) as pipe,
        pytest.raises(penstock.errors.PartitionError, match=r"stages \d and \d both compute"),
    ):
        pipe.train_step(*drawn(7))


@pytest.mark.parametrize("way", WAYS)
def test_weights_tied_after_the_pipeline_was_made_are_refused(way: dict[str, Any]) -> None:
    layers = stack()
    with penstock.Pipeline(layers, partition=(2, 2), loss=nn.MSELoss(), **options(way)) as pipe:
        layers[2].weight = layers[0].weight
        with pytest.raises(penstock.errors.PartitionError, match="both compute a gradient"):
            pipe.train_step(*drawn(7))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class FromNumpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(np.random.default_rng().random())


class FromSystem(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.SystemRandom().random()


@pytest.mark.parametrize("kind", (Counting, FromNumpy, FromSystem))
@pytest.mark.parametrize("place", (0, 2, 4))
@pytest.mark.parametrize("way", WITH_RECOMPUTE)
def test_state_that_a_recompute_cannot_see_again_is_refused(kind, place, way) -> None:
    layers = stack()
    layers.insert(place, kind())
    with penstock.Pipeline(layers, partition=(2, 3), loss=nn.MSELoss(), **options(way)) as pipe:
        recomputed = way["schedule"] is gpipe or place < 2  # 1F1B's last stage recomputes nothing
        if not recomputed:
            pipe.train_step(*drawn(7))
            return
        with pytest.raises(penstock.errors.RecomputeError, match="did not give what its forward"):
            pipe.train_step(*drawn(7))


@pytest.mark.parametrize("way", WITH_RECOMPUTE)
def test_such_state_in_the_loss_is_refused_too(way: dict[str, Any]) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * random.SystemRandom().random()

    pipe = penstock.Pipeline(stack(), 2, loss=loss, **options(way | {"schedule": gpipe}))
    with pipe, pytest.raises(penstock.errors.RecomputeError, match="the loss draws"):
        pipe.train_step(*drawn(7))


class MovingLoss(nn.Module):
    """A loss that normalises, and weighs by a moving average that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.average: Tensor
        self.register_buffer("average", torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * target.abs().mean()
        return F.mse_loss(self.norm(output), target) * self.average


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_with_state_equals_the_unsplit_one(way: dict[str, Any]) -> None:
    ours, theirs, our_loss, their_loss = stack(), stack(), MovingLoss(), MovingLoss()
    unsplit = Unsplit([*theirs, their_loss], chain(4), 3)
    with penstock.Pipeline(ours, 2, loss=our_loss, **options(way)) as pipe:
        for _ in range(3):
            found = pipe.train_step(*drawn(9))
            assert same_bits(found, unsplit.train_step(*drawn(9), their_loss))
            assert not differences([*ours, our_loss], [*theirs, their_loss])


@pytest.mark.parametrize("way", WAYS)
def test_targets_that_require_grad_are_refused(way: dict[str, Any]) -> None:
    x, y = drawn(7)
    pipe = penstock.Pipeline(stack(), 2, loss=nn.MSELoss(), **options(way))
    with pipe, pytest.raises(penstock.errors.ConfigError, match=r"target\.detach"):
        pipe.train_step(x, y.requires_grad_())


@pytest.mark.parametrize("way", WAYS)
def test_weights_replaced_between_forward_and_backward_are_right_or_refused(way: Any) -> None:
    layers = stack()
    x, y = drawn(7)
    with penstock.Pipeline(layers, 2, **options(way)) as pipe:
        loss = F.mse_loss(pipe(x), y)
        for layer in (layers[0], layers[2]):
            weight = layer.get_parameter("weight")
            weight.data = weight.data + 1.0
        try:
            loss.backward()
        except penstock.errors.RecomputeError as error:
            assert "a weight was changed" in str(error)
        else:
            assert way["recompute"] is penstock.Recompute.NEVER


class Twice(nn.Module):  # give a value and a view of it
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y.view_as(y)


def changed_in_place() -> list[penstock.Layer]:
    """Make layers of which one changes a value in place that the next sees under another name."""
    return [
        penstock.Layer(Twice(), outputs=("a", "b")),
        penstock.Layer(Does(lambda x: x.add_(1.0)), inputs="a", outputs="c"),
        penstock.Layer(Does(lambda a, b: (a * b)[:, :3]), inputs=("c", "b")),
    ]


@pytest.mark.parametrize("partition, way", one_each(((2, 2), (2, 1, 1), (1, 1, 1, 1), (4,)), WAYS))
def test_a_change_in_place_that_another_value_would_show_is_right_or_refused(
    partition: tuple[int, ...], way: dict[str, Any]
) -> None:

    def forward(call: Any, x: Any) -> Any:
        a, b = call(1, call(0, x))
        return call(3, call(2, a), b)

    made = model(lambda: [nn.Linear(6, 6), *changed_in_place()], forward)
    try:
        assert_trains_like_unsplit(made, 7, partition=partition, num_microbatches=3, **way)
    except penstock.errors.BoundaryError as error:
        assert "shares memory" in str(error)


class Queue(nn.Module):
    """Give a buffer along with the value, and move the buffer in place at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Tensor
        self.register_buffer("rows", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.rows.mul_(0.5).add_(x.detach().mean(0))
        return x, self.rows


@pytest.mark.parametrize("partition, way", one_each(((2, 1), (1, 2), (1, 1, 1), (3,)), WAYS))
def test_a_buffer_that_travels_and_moves_in_place_is_right_or_refused(partition, way) -> None:
    def layers() -> list[Any]:
        return [
            nn.Linear(6, 6),
            penstock.Layer(Queue(), outputs=("x", "rows")),
            penstock.Layer(Does(lambda x, rows: (x @ rows.T)[:, :3]), inputs=("x", "rows")),
        ]

    def forward(call: Any, x: Any) -> Any:
        return call(2, *call(1, call(0, x)))

    made = model(layers, forward)
    try:
        assert_trains_like_unsplit(made, 9, partition=partition, num_microbatches=3, **way)
    except (penstock.PenstockError, RuntimeError) as error:
        assert any(word in str(error) for word in ("in place", "inplace"))


@pytest.mark.parametrize("way", WAYS)
def test_a_first_micro_batch_without_weight_hides_no_second_owner(way: dict[str, Any]) -> None:
    ours = stack()

    def real(target: Tensor) -> Tensor:
        return (target[:, 0] > -50).sum()

    x, y = drawn(6)
    y[:2] = -100.0  # all of the first micro-batch is padding
    pipe = penstock.Pipeline(ours, 2, loss=penalised(ours), reduction=real, **options(way))
    with pipe, pytest.raises(penstock.errors.PartitionError, match="both compute"):
        pipe.train_step(x, y)


class TwoHalves(nn.Module):
    """Change one of two inputs in place; they lie side by side in one tensor."""

    def forward(self, halves: tuple[Tensor, Tensor]) -> Tensor:
        a, b = halves
        return torch.cat([a.sub_(1.0), b], dim=1)


@pytest.mark.parametrize("way", WAYS)
def test_columns_of_one_tensor_count_as_one_memory(way: dict[str, Any]) -> None:
    """A copy of one of them is a memory of its own."""
    whole = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
    halves, target, found = whole.chunk(2, dim=1), torch.zeros(6, 3), []
    with penstock.Pipeline([TwoHalves(), *stack()], 2, loss=nn.MSELoss(), **options(way)) as pipe:
        with pytest.raises(BoundaryError, match=r"shares memory with another.*Give a copy"):
            pipe.train_step(halves, target)
        for inputs in ((halves[0].clone(), halves[1]), (halves[0].clone(), halves[1].clone())):
            found.append(pipe.train_step(inputs, target))
    assert same_bits(*found)


class MovesLater(nn.Module):  # a buffer that moves in training mode, as soon as it is let
    def __init__(self) -> None:
        super().__init__()
        self.moves = True
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.moves:
            self.scale.mul_(0.9)
        return x * self.scale


@pytest.mark.parametrize("way", WITH_RECOMPUTE)
def test_a_buffer_that_begins_to_move_is_refused_once(way: dict[str, Any]) -> None:
    later = MovesLater()
    later.moves = False
    layers = [nn.Linear(6, 6), later, nn.Linear(6, 3)]
    x, y = drawn(7)
    with penstock.Pipeline(layers, 1, loss=nn.MSELoss(), **options(way)) as pipe:
        pipe.train_step(x, y)
        later.moves = True
        if way["schedule"] is gpipe:
            with pytest.raises(penstock.errors.RecomputeError, match="run the step again"):
                pipe.train_step(x, y)
        pipe.train_step(x, y)


@pytest.mark.parametrize("way", WITH_RECOMPUTE)
def test_a_buffer_that_moves_in_another_mode_moves_once_per_micro_batch(way: Any) -> None:
    later = MovesLater()
    layers = [nn.Linear(6, 6), later, nn.Linear(6, 3)]
    x, y = drawn(7)
    with penstock.Pipeline(layers, 1, loss=nn.MSELoss(), **options(way)) as pipe:
        later.eval()
        pipe.train_step(x, y)
        later.train()
        pipe.train_step(x, y)
    expected = torch.ones(6)
    for _ in range(pipe.num_microbatches):
        expected.mul_(0.9)
    assert torch.equal(later.scale, expected)


class ReadsBack(nn.Module):
    """Read the first block's weight after the last one, where a value says so."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = x[0, 0].item()
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x @ self.blocks[0].get_parameter("weight") if first > 5 else x


@pytest.mark.parametrize("way, hot", one_each(WAYS, (0, 2, 4)))
def test_a_second_owner_in_a_later_micro_batch_only_is_refused(hot: int, way: Any) -> None:
    torch.manual_seed(0)
    x = torch.zeros(6, 6)
    layers = penstock.capture(ReadsBack(), x.clone())
    x[hot, 0] = 9.0
    pipe = penstock.Pipeline(layers, 2, loss=F.mse_loss, **options(way))
    with pipe, pytest.raises(penstock.errors.PartitionError, match="both compute"):
        pipe.train_step(x, torch.zeros(6, 6))


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_an_evaluation_changes_no_value_that_another_one_would_show(mode) -> None:
    x, _ = vectors(4, torch.Generator().manual_seed(1))
    pipe = penstock.Pipeline(changed_in_place(), 3, num_microbatches=2, loss=F.mse_loss)
    with pipe, mode(), pytest.raises(BoundaryError, match="shares memory"):
        pipe.eval_step(x)


class ChangesBatch(nn.Module):
    """Change the batch in place, and read it before the first block and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.5)
        h = x
        for block in self.blocks:
            h = torch.tanh(block(h))
        return h + x


@pytest.mark.parametrize("num_stages", (1, 2, 4))
def test_each_stage_that_reads_the_batch_changes_its_own_in_evaluation(num_stages: int) -> None:
    torch.manual_seed(0)
    model, x = ChangesBatch(), torch.randn(4, 6)
    layers = penstock.capture(model, x.clone(), inputs="everywhere")
    with penstock.Pipeline(
        layers, num_stages, num_microbatches=2, loss=F.mse_loss, threads_per_stage=1
    ) as pipe:
        found = pipe.eval_step(x.clone())
    with torch.no_grad():
        expected = torch.cat([model(part.clone()) for part in x.split(2)])
    assert torch.equal(found, expected)


class DoublesData(nn.Module):  # double a value past autograd, before each block; add it at the end
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        skip = x + 0
        for block in self.blocks:
            skip.data.mul_(2)
            x = torch.tanh(block(x))
        return x + skip


@pytest.mark.parametrize("recompute", penstock.Recompute)
@pytest.mark.parametrize("partition", ((1, 3), (2, 2), (1, 1, 1, 1)), ids=str)
def test_changes_that_autograd_does_not_see_are_made_once(partition, recompute) -> None:
    torch.manual_seed(0)
    model = DoublesData()
    parameters, x, y = list(model.parameters()), torch.randn(6, 6), torch.randn(6, 6)
    options: dict[str, Any] = {"loss": F.mse_loss, "recompute": recompute, "threads_per_stage": 1}
    with penstock.Pipeline(
        penstock.capture(model, x), partition=partition, num_microbatches=3, **options
    ) as pipe:
        for _ in range(2):
            model.zero_grad()
            pipe.train_step(x, y)
            found = [p.grad for p in parameters]
            model.zero_grad()
            for part, target in zip(x.split(2), y.split(2), strict=True):
                loss = F.mse_loss(model(part), target)
                loss.backward(torch.full_like(loss, 1 / 3))
            for parameter, gradient in zip(parameters, found, strict=True):
                assert parameter.grad is not None and gradient is not None
                assert torch.equal(parameter.grad, gradient)
