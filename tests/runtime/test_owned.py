"""Every use of what a pipeline owns knows a tensor at every place that a model can have one."""

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipeline
from penstock.errors import BoundaryError, ConfigError, RecomputeError
from tests.distributed.test_owned import Loss, Places

PARAMETERS = {
    "a layer": "blocks.1.layer.weight",
    "a layer's own code": "stem.bias",
    "before all layers": "class_token",
    "after all layers": "scale",
    "on two stages": "shared",
    "the loss": "loss.temperature",
}
BUFFERS = {
    "a layer": "blocks.1.gate",
    "a layer's own code": "stem.factor",
    "between layers": "offset",
    "the loss": "loss.margin",
}
BATCH = torch.randn(8, 3, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(8)


def made(**options: Any) -> Pipeline:
    torch.manual_seed(0)
    model, loss = Places(), options.pop("loss", Loss())
    captured = penstock.capture(model, BATCH[0][:2])
    return Pipeline(captured, **{"num_stages": 2, "num_microbatches": 4, "loss": loss, **options})


def listed(pipe: Pipeline) -> set[str]:
    everyone = [*pipe.parameters()]
    return {n for n, p in pipe.named_parameters() if sum(p is other for other in everyone) == 1}


def clipped(pipe: Pipeline) -> set[str]:
    pipe.train_step(*BATCH)
    before = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    norm = penstock.clip_grad_norm_(pipe, 1e-3)
    assert torch.allclose(norm, torch.stack([g.norm() for g in before.values()]).norm())
    after = {n: p.grad for n, p in pipe.named_parameters()}
    return {n for n, x in after.items() if x is not None and (x.abs() < before[n].abs()).all()}


def unscaled(pipe: Pipeline) -> set[str]:
    pipe.train_step(*BATCH)
    wanted = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
    pipe.zero_grad()
    scaler = penstock.GradScaler(pipe, init_scale=64.0)
    pipe.train_step(*BATCH, loss_scale=scaler.get_scale())
    scaler.unscale_(torch.optim.SGD(pipe.parameters(), lr=0.1))
    after = {n: p.grad for n, p in pipe.named_parameters()}
    return {n for n, x in after.items() if x is not None and torch.equal(x, wanted[n])}


def moved_asynchronously(_pipe: Pipeline) -> set[str]:
    pipe = made(schedule=penstock.schedules.pipedream_2bw)
    before = {n: p.detach().clone() for n, p in pipe.named_parameters()}
    pipe.train_steps([BATCH] * 2, torch.optim.SGD(pipe.parameters(), lr=0.1))
    return {n for n, p in pipe.named_parameters() if not (p == before[n]).any()}


def guarded(_pipe: Pipeline) -> set[str]:
    """Name those that are seen to change between a forward and its recompute."""
    # One stage: others might be at work on what changes.  GPipe: 1F1B would recompute nothing.
    pipe = made(num_stages=1, schedule="gpipe")
    found, changed = set(), dict(pipe.named_parameters())

    def change(_loss: nn.Module, _given: Any, _value: Tensor) -> None:
        with torch.no_grad():
            changed[name].add_(1)

    handle = pipe.get_submodule("loss").register_forward_hook(change)
    for name in changed:
        with suppress(RecomputeError, BoundaryError):
            pipe.train_step(*BATCH)
            continue
        found.add(name)
    handle.remove()
    return found


USES: list[Callable[[Pipeline], set[str]]] = [
    listed,
    clipped,
    unscaled,
    moved_asynchronously,
    guarded,
]


@pytest.mark.parametrize("use", USES)
def test_each_use_knows_a_parameter_at_each_place(use: Callable[[Pipeline], set[str]]) -> None:
    pipe = made()
    every = {name for name, _ in pipe.named_parameters()}
    assert set(PARAMETERS.values()) <= every
    assert use(pipe) == every


def test_stages_copies_and_checkpoints_have_all_that_is_owned(tmp_path: Path) -> None:
    pipe = made()
    tensors = pipe.state_dict(keep_vars=True)
    assert {*PARAMETERS.values(), *BUFFERS.values()} <= tensors.keys()
    of_stages = pipe._engine.tensors()
    copied = copy.deepcopy(pipe).state_dict(keep_vars=True)
    penstock.save_checkpoint(tmp_path / "saved", pipe)
    other = made()
    for tensor in other.state_dict().values():
        tensor.zero_()
    penstock.load_checkpoint(tmp_path / "saved", other)
    for name, tensor in tensors.items():
        assert sum(x is tensor for x in of_stages) == 1, name
        assert copied[name] is not tensor, name
        assert torch.equal(copied[name], tensor), name
        assert torch.equal(other.state_dict()[name], tensor), name


def test_a_model_without_the_loss_loads_what_is_its_own(tmp_path: Path) -> None:
    pipe = made()
    penstock.save_checkpoint(tmp_path / "saved", pipe)
    torch.manual_seed(1)
    model = Places()
    penstock.load_checkpoint(tmp_path / "saved", model)
    assert torch.equal(model.state_dict()["scale"], pipe.state_dict()["scale"])
    assert torch.equal(model.state_dict()["offset"], pipe.state_dict()["offset"])
    alone = Pipeline(
        penstock.capture(Places(), BATCH[0][:2]), 2, num_microbatches=1
    )  # no loss: to evaluate with
    penstock.load_checkpoint(tmp_path / "saved", alone)
    assert torch.equal(alone.eval_step(BATCH[0]), pipe.eval_step(BATCH[0]))


def test_the_gradient_of_a_loss_is_the_unsplit_models() -> None:
    torch.manual_seed(0)
    model, loss = Places(), Loss()
    report = penstock.check(model, *BATCH, loss=loss, num_stages=3, num_microbatches=4)
    assert report.equal, report
    names = {row.name for row in report.rows if row.kind == "gradient"}
    assert {"loss.temperature", "shared", "class_token"} <= names


def test_a_loss_and_a_layer_of_one_name_are_refused() -> None:
    layers = nn.Sequential()
    layers.add_module("loss", nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="the model has a child of that name"):
        Pipeline(layers, 1, loss=Loss(), num_microbatches=1)
    assert Pipeline(layers, 1, loss=nn.MSELoss(), num_microbatches=1).eval_step(
        torch.zeros(2, 4)
    ).shape == (2, 4)


def test_a_loss_that_has_the_models_own_weight_counts_it_once() -> None:
    class Penalty(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (self.layer(output) - target).square().mean()

    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = Pipeline(layers, 1, num_microbatches=2, loss=Penalty(layers[1]))
    assert len(list(pipe.parameters())) == 4
    pipe.train_step(torch.randn(4, 4), torch.zeros(4, 4))
    found = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    norm = penstock.clip_grad_norm_(pipe, 1e9)
    assert torch.allclose(norm, torch.stack([g.norm() for g in found]).norm())
