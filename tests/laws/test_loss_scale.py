"""Loss scaling: gradients come back to the unscaled bits, and an inf anywhere skips everywhere."""

import copy
from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from tests.models import BY_NAME, Model
from tests.reference import Unsplit, Weigh, mean
from tests.side_by_side import differences, pipeline, same_bits
from tests.ways import WAYS, one_each

SCALED = [BY_NAME[name] for name in ("transformer", "fan_out", "batch_norms", "frozen_middle")]


def descent(pipe: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)


def options(number: int = 3, **others: Any) -> dict[str, Any]:
    return {"num_stages": number, "num_microbatches": 3, **others}


@pytest.mark.parametrize(
    "way, model, exponent",
    one_each(
        WAYS,
        [
            pytest.param(model, exponent, id=f"{model.name}-{exponent}")
            for model, exponent in zip(SCALED, cycle((-8, 16)), strict=False)
        ],
    ),
)
def test_gradients_come_back_from_a_power_of_two_to_the_unscaled_bits(
    model: Model, way: dict[str, Any], exponent: int
) -> None:
    built, twin = model.build(), model.build()
    pipe = pipeline(model, built, **options(**way))
    with pipe, pipeline(model, twin, **options(**way)) as unscaled:
        scaler = penstock.GradScaler(pipe, init_scale=2.0**exponent)
        for batch, same in zip(model.batches(7, 2), model.batches(7, 2), strict=True):
            loss = pipe.train_step(*batch, loss_scale=scaler.get_scale())
            assert same_bits(loss, unscaled.train_step(*same))
        assert differences(built.modules, twin.modules)
        scaler.unscale_(descent(pipe))
        assert not differences(built.modules, twin.modules)


def test_a_scaler_scales_a_loss_over_the_modules_outputs_too() -> None:
    model = BY_NAME["mlp"]
    built, twin = model.build(), model.build()
    ((inputs, targets),) = model.batches(7, 1)
    pipe = pipeline(model, built, **options())
    with pipe, pipeline(model, twin, **options()) as unscaled:
        scaler = penstock.GradScaler(pipe)
        scaler.scale(model.loss(pipe(inputs), targets)).backward()
        model.loss(unscaled(inputs), targets).backward()
        assert differences(built.modules, twin.modules)
        scaler.unscale_(descent(pipe))
        assert not differences(built.modules, twin.modules)


def scaled(scale: float) -> Weigh:
    return lambda targets, sizes: [weight * scale for weight in mean(targets, sizes)]


@pytest.mark.parametrize(
    ("name", "way"),
    one_each(("mlp", "convolutions", "transformer", "unet"), WAYS),
)
def test_float16_training_is_the_unsplit_models_with_torchs_own_scaler(name, way) -> None:
    model = BY_NAME[name]
    built, twin = model.build(), model.build()
    unsplit = Unsplit(twin.modules, twin.forward, num_microbatches=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    theirs.scale(torch.ones(()))
    their_optimizer = descent(nn.ModuleList(twin.modules))
    scales = []
    with pipeline(model, built, **options(**way)) as pipe:
        ours = penstock.GradScaler(pipe, init_scale=2.0**24, growth_interval=2)
        optimizer = descent(pipe)
        for batch, same in zip(model.batches(7, 20), model.batches(7, 20), strict=True):
            scales.append(ours.get_scale())
            unsplit.weigh = scaled(theirs.get_scale())
            with torch.autocast("cpu", torch.float16):
                loss = pipe.train_step(*batch, loss_scale=ours.get_scale())
                expected = unsplit.train_step(*same, model.loss)
            assert loss == pytest.approx(float(expected) / theirs.get_scale())
            for scaler, stepped in ((ours, optimizer), (theirs, their_optimizer)):
                scaler.step(stepped)
                scaler.update()
            if ours.get_scale() < scales[-1]:  # gradients are nan, which equals nothing
                optimizer.zero_grad(), their_optimizer.zero_grad()
            assert not differences(built.modules, twin.modules)
            optimizer.zero_grad(), their_optimizer.zero_grad()
            assert ours.state_dict() == theirs.state_dict()
    assert min(scales) < scales[0], "nothing ever overflowed"
    assert any(b > a for a, b in pairwise(scales)), "it never grew"


def overflowing(pipe: penstock.Pipeline, layer: int) -> None:
    """Let one layer's gradient be inf, while the step's number is 1."""

    def overflow(gradient: Tensor) -> Tensor:
        return gradient * torch.inf if pipe.step == 2 else gradient  # it counts when one begins

    next(iter(pipe[layer].parameters())).register_hook(overflow)


@pytest.mark.parametrize("clips", (False, True))
@pytest.mark.parametrize("fused", (False, True))
@pytest.mark.parametrize("layer", (0, 2, 4))
def test_an_inf_on_one_stage_skips_the_step_of_all(clips: bool, fused: bool, layer: int) -> None:
    model = BY_NAME["mlp"]
    built = model.build()
    with pipeline(model, built, **options()) as pipe:
        overflowing(pipe, layer)
        scaler = penstock.GradScaler(pipe, init_scale=1024.0)
        optimizer = torch.optim.AdamW(pipe.parameters(), fused=fused)
        moved = []
        for batch in model.batches(7, 3):
            before = copy.deepcopy(pipe.state_dict())
            pipe.train_step(*batch, loss_scale=scaler.get_scale())
            if clips:
                scaler.unscale_(optimizer)
                penstock.clip_grad_norm_(pipe, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = pipe.state_dict()
            moved.append({not torch.equal(before[name], after[name]) for name in before})
        assert moved == [{True}, {False}, {True}] and scaler.get_scale() == 512.0


def test_a_scalers_state_is_plain_numbers_and_goes_into_another() -> None:
    with pipeline(BY_NAME["mlp"], BY_NAME["mlp"].build(), **options()) as pipe:
        scaler = penstock.GradScaler(pipe, init_scale=64.0, growth_interval=2)
        optimizer = descent(pipe)
        (batch,) = BY_NAME["mlp"].batches(7, 1)
        pipe.train_step(*batch, loss_scale=scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        state = scaler.state_dict()
        assert all(type(value) in (int, float) for value in state.values())
        other = penstock.GradScaler(pipe)
        other.load_state_dict(state)
        for each in (scaler, other, copy.deepcopy(other)):
            pipe.train_step(*batch, loss_scale=each.get_scale())
            each.step(optimizer)
            each.update()
            assert each.get_scale() == 128.0


def test_a_scaler_that_is_switched_off_changes_nothing() -> None:
    model = BY_NAME["mlp"]
    with pipeline(model, model.build(), **options()) as pipe:
        scaler, optimizer = penstock.GradScaler(pipe, enabled=False), descent(pipe)
        before = copy.deepcopy(pipe.state_dict())
        for batch in model.batches(7, 1):
            pipe.train_step(*batch, loss_scale=scaler.get_scale())
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.state_dict() == {}
        assert not torch.equal(before["0.weight"], pipe.state_dict()["0.weight"])


@pytest.mark.parametrize("loss_scale", (0, -1.0, float("inf"), float("nan"), "2", None))
def test_a_scale_that_no_gradient_can_be_divided_by_is_refused(loss_scale: Any) -> None:
    model = BY_NAME["mlp"]
    with pipeline(model, model.build(), **options()) as pipe:
        (batch,) = model.batches(7, 1)
        with pytest.raises(penstock.PenstockError, match=r"loss_scale=.*finite number above 0"):
            pipe.train_step(*batch, loss_scale=loss_scale)
        pipe.train_step(*batch, loss_scale=2)
