"""The drop-in module: any whole-batch loss, and evaluation, give the unsplit model's bits."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.model.pytree import flatten
from penstock.schedules import gpipe, one_f_one_b
from tests.every_schedule import IN_TWO_PARTS
from tests.models import ALL_MODELS, BY_NAME, Built, Model
from tests.reference import Unsplit, chain
from tests.side_by_side import autocast, differences, pipeline, same_bits
from tests.ways import one_each, pairwise

OPTIONS = [
    pytest.param(
        {
            "num_stages": k,
            "num_microbatches": m,
            "schedule": schedule,
            "recompute": r,
            "transport": t,
        },
        id=f"K{k}-M{m}-{schedule.name}-recompute_{r.value}-{t.name.lower()}",
    )
    for k, m, schedule, r, t in (
        (1, 3, IN_TWO_PARTS, penstock.Recompute.NEVER, penstock.Transport.LOOPBACK),
        (2, 1, one_f_one_b, penstock.Recompute.STAGE, penstock.Transport.THREADS),
        (3, 4, gpipe, penstock.Recompute.STAGE, penstock.Transport.LOOPBACK),
        (4, 3, IN_TWO_PARTS, penstock.Recompute.NEVER, penstock.Transport.THREADS),
    )
]


def pair_of(
    model: Model, **options: Any
) -> tuple[penstock.Pipeline, Unsplit, Callable[[], list[str]]]:
    """Build a model twice: as a pipeline and unsplit; the last value names where they differ."""
    built, twin = model.build(), model.build()
    unsplit = Unsplit(twin.modules, twin.forward, options["num_microbatches"])
    return (
        pipeline(model, built, **options),
        unsplit,
        lambda: differences(built.modules, twin.modules),
    )


@pytest.mark.parametrize("model, options", one_each(ALL_MODELS, OPTIONS))
def test_a_whole_batch_loss_gives_the_unsplit_gradients(model: Model, options: Any) -> None:
    pipe, unsplit, differ = pair_of(model, **options)
    ours, theirs = model.batches(9, count=2), model.batches(9, count=2)
    with pipe:
        for step, ((x, y), (same_x, _)) in enumerate(zip(ours, theirs, strict=True)):
            with autocast(step == 1):  # around the forward only, as torch advises
                output = pipe(x)
                loss, outstanding = model.loss(output, y), unsplit.module_forward(same_x)
                expected = model.loss(outstanding.output, y)
            assert same_bits(loss, expected)
            loss.backward()
            expected.backward()
            outstanding.backward()
            assert not differ(), f"step {step}"


@pytest.mark.parametrize(
    "name, options",
    one_each(("mlp", "convolutions", "fan_out", "unet", "views", "lstm"), OPTIONS),
)
def test_the_gradient_of_the_input_is_the_unsplit_one(name: str, options: dict[str, Any]) -> None:
    model = BY_NAME[name]
    pipe, unsplit, differ = pair_of(model, **options)
    [(x, y)] = model.batches(7, count=1)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with pipe:
        for _ in range(2):
            model.loss(pipe(ours), y).backward()
            unsplit.module_step(theirs, y, model.loss)
            assert same_bits(ours.grad, theirs.grad) and not differ()


@pytest.mark.parametrize(
    "model, last_first, options",
    pairwise(
        [BY_NAME[name] for name in ("convolutions", "transformer", "changing_buffers")],
        (True, False),
        OPTIONS,
    ),
)
def test_two_forwards_may_await_their_backward(
    model: Model, last_first: bool, options: Any
) -> None:
    pipe, unsplit, differ = pair_of(model, **options)
    batches = model.batches(6, count=2)
    with pipe:
        losses = [model.loss(pipe(x), y) for x, y in batches]
        waiting = [unsplit.module_forward(x) for x, _ in batches]
        for n in (1, 0) if last_first else (0, 1):
            losses[n].backward()
            expected = model.loss(waiting[n].output, batches[n][1])
            expected.backward()
            waiting[n].backward()
            assert same_bits(losses[n], expected) and not differ()


class Several(nn.Module):
    """Give a dict of outputs, with None, a number and one that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        pair = (self.left(x), self.right(x))
        return {"pair": pair, "rank": x.detach().argmax(1), "none": None, "n": 7}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("use", ("both", "left only"))
def test_outputs_may_be_a_nest_of_tensors_and_some_may_go_unused(use: str, options: Any) -> None:
    def layers() -> list[Any]:
        return [nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8), Several()]

    def loss(output: dict[str, Any], y: Tensor) -> Tensor:
        left = F.mse_loss(output["pair"][0], y)
        return left if use == "left only" else left * 2 + output["pair"][1].square().mean()

    model = Model("several", layers, BY_NAME["mlp"].batch, loss)
    pipe, unsplit, differ = pair_of(model, **options)
    [(x, y)] = model.batches(7, count=1)
    with pipe:
        output = pipe(x)
        loss(output, y).backward()
        outstanding = unsplit.module_step(x, y, loss)
        expected = outstanding.output
        assert (output["none"], output["n"]) == (None, 7)
        assert same_bits(output["rank"], expected["rank"])
        assert same_bits(output["pair"][0], expected["pair"][0])
        assert same_bits(output["pair"][1], expected["pair"][1]) and not differ()


def test_the_module_form_and_train_step_share_one_count_of_steps() -> None:
    model = BY_NAME["transformer"]
    pipe, unsplit, differ = pair_of(model, num_stages=2, num_microbatches=2)
    batches = model.batches(5, count=3)
    with pipe:
        for n, (x, y) in enumerate(batches):
            if n % 2:
                model.loss(pipe(x), y).backward()
                unsplit.module_step(x, y, model.loss)
            else:
                assert same_bits(pipe.train_step(x, y), unsplit.train_step(x, y, model.loss))
            assert not differ()
        assert pipe.step == 3


@pytest.mark.parametrize(
    "model, num_samples, options",
    one_each(
        [model for model in ALL_MODELS if model.quiet_in_eval],
        [
            pytest.param(n, *options.values, id=f"N{n}-{options.id}")
            for n, options in product((1, 2, 9), OPTIONS)
        ],
    ),
)
def test_evaluation_equals_the_unsplit_model(model: Model, num_samples: int, options: Any) -> None:
    pipe, unsplit, differ = pair_of(model, **options)
    ours, theirs = model.batches(num_samples, count=2), model.batches(num_samples, count=2)
    modes = [module.training for module in pipe.modules()]
    with pipe:
        for (x, _), (same_x, _) in zip(ours, theirs, strict=True):
            outputs, expected = flatten(pipe.eval_step(x))[0], flatten(unsplit.evaluate(same_x))[0]
            assert not any(output.requires_grad for output in outputs)
            assert all(map(same_bits, outputs, expected)) and len(outputs) == len(expected)
    assert [module.training for module in pipe.modules()] == modes and not differ()


@pytest.mark.parametrize(
    "name, options",
    one_each(("convolutions", "transformer", "changing_buffers", "fan_out"), OPTIONS),
)
def test_evaluation_may_come_between_training_steps_in_any_order(name: str, options: Any) -> None:
    model = BY_NAME[name]
    pipe, unsplit, differ = pair_of(model, **options)
    batches = model.batches(7, count=7)
    with pipe:
        for do, (x, y) in zip("ettetee", batches, strict=True):
            if do == "e":
                assert same_bits(pipe.eval_step(x[:5]), unsplit.evaluate(x[:5]))
            else:
                assert same_bits(pipe.train_step(x, y), unsplit.train_step(x, y, model.loss))
            assert not differ()


def test_evaluation_between_a_forward_and_its_backward_changes_nothing() -> None:
    model = BY_NAME["convolutions"]
    pipe, unsplit, differ = pair_of(model, num_stages=3, num_microbatches=3)
    [(x, y), (other, _)] = model.batches(7, count=2)
    with pipe:
        loss = model.loss(pipe(x), y)
        pipe.eval_step(other)
        loss.backward()
        unsplit.module_step(x, y, model.loss)
        assert not differ()


def test_without_gradients_the_module_gives_the_unsplit_outputs() -> None:
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)]
    built, x = Built(layers, layers, chain(3)), torch.randn(5, 6)
    pipe = pipeline(BY_NAME["mlp"], built, num_stages=3, num_microbatches=2)
    with pipe, torch.no_grad():
        output = pipe(x)
        assert not output.requires_grad
        expected = torch.cat([nn.Sequential(*layers)(piece) for piece in x.tensor_split(2)])
    assert same_bits(output, expected)


def test_gradients_of_parameters_are_found_in_grad_only() -> None:
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    x, weights = torch.randn(4, 6, requires_grad=True), list(layers.parameters())
    expected = torch.autograd.grad(layers(x).sum(), [x, *weights])
    options: dict[str, Any] = {"num_microbatches": 1, "threads_per_stage": 1}
    with penstock.Pipeline(layers, num_stages=2, **options) as pipe:
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(pipe(x).sum(), weights)
        found = torch.autograd.grad(pipe(x).sum(), weights, allow_unused=True)
        pipe(x).sum().backward(inputs=weights)
        assert [*found, *(weight.grad for weight in weights)] == [None] * 2 * len(weights)
        (of_input,) = torch.autograd.grad(pipe(x).sum(), x)
    assert x.grad is None
    assert all(map(same_bits, [of_input, *(weight.grad for weight in weights)], expected))
