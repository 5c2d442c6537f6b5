"""Hooks on parameters that several processes share are given the step's gradient, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError
from penstock.planner.placement import Placement
from penstock.schedules import pipedream_2bw
from tests.distributed.call import call

X, Y = torch.randn(2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LAYOUTS = {"replicas": Placement.of(range(1), 2), "shards": Placement.of(range(1), num_shards=2)}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


def watched(of: nn.Module) -> list[str]:
    """Hook a model: a clamp, a norm, one that steps at once and one that is gone after a call."""
    calls: list[str] = []
    first, first_bias, last, last_bias = of.parameters()

    def clamped(gradient: Tensor) -> Tensor:
        calls.append("found")
        return gradient.clamp(-0.01, 0.01)

    def stepped(parameter: Tensor) -> None:
        calls.append("added")
        assert parameter.grad is not None
        parameter.sub_(parameter.grad.sign(), alpha=0.5)

    def once(gradient: Tensor) -> None:
        calls.append("once")
        handle.remove()

    first.register_hook(clamped)
    last.register_hook(lambda gradient: gradient / gradient.norm())
    last.register_hook(lambda gradient: gradient + 1)
    first_bias.register_post_accumulate_grad_hook(stepped)
    handle = last_bias.register_hook(once)
    return calls


def left(of: nn.Module) -> list[Tensor]:
    every = [t for p in of.parameters() for t in (p, p.grad)]
    return [t.detach().clone() for t in every if t is not None]


def unsplit() -> tuple[list[str], list[Tensor]]:
    """Two whole batches."""
    alone = model()
    calls = watched(alone)
    for _ in range(2):
        nn.functional.mse_loss(alone(X), Y).backward()
    return calls, left(alone)


def piped(mesh: penstock.Mesh, sharding: str | None, of: nn.Module) -> penstock.Pipeline:
    return penstock.Pipeline(
        of,
        mesh=mesh,
        num_microbatches=2,
        loss=nn.functional.mse_loss,
        sharding=sharding,
        example_inputs=X[:4],
    )


def batch(mesh: penstock.Mesh) -> tuple[Tensor, Tensor]:
    return X.chunk(mesh.num_replicas)[mesh.replica], Y.chunk(mesh.num_replicas)[mesh.replica]


def hooked(mesh: penstock.Mesh, sharding: str | None) -> Any:
    own = model()
    pipe = piped(mesh, sharding, own)
    calls = watched(own)
    for _ in range(2):
        pipe.train_step(*batch(mesh))
    return calls, left(own)


@pytest.mark.parametrize(("layout", "sharding"), [("replicas", None), ("shards", "data")])
def test_a_hook_sees_once_what_is_summed(layout: str, sharding: str | None, tmp_path: Path) -> None:
    calls, expected = unsplit()
    for found, values in call(hooked, LAYOUTS[layout], tmp_path, sharding=sharding):
        assert sorted(found) == sorted(calls)
        for ours, theirs in zip(values, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def refused(mesh: penstock.Mesh, plans: list[str]) -> dict[str, list[str]]:
    """Clamp a weight's gradient, and look at what was added; tell what each plan does with it."""
    found: dict[str, list[str]] = {}
    for sharding in plans:
        own = model()
        pipe = piped(mesh, sharding, own)
        weight = own.get_parameter("0.weight")
        for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
            handle = register(lambda tensor: None)
            try:
                pipe.train_step(*batch(mesh))
                found.setdefault(sharding, []).append("")
            except ConfigError as error:
                found.setdefault(sharding, []).append(str(error))
            handle.remove()
    return found


@pytest.mark.parametrize(
    ("layout", "plans"), [("replicas", ["zero1"]), ("shards", ["zero1", "zero2", "zero3"])]
)
def test_a_hook_that_would_see_a_slice_is_refused(
    layout: str, plans: list[str], tmp_path: Path
) -> None:
    for told in call(refused, LAYOUTS[layout], tmp_path, plans=plans):
        for sharding, (found, added) in told.items():
            assert f"parameter '0.weight' cannot be run as in the unsplit model with" in added
            assert f"sharding={sharding}" in added and "Remove the hook" in added
            assert bool(found) == (sharding != "zero1"), (sharding, found)
