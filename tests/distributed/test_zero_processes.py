"""Weights cut between steps along replicas change no bit, and divide the optimizer's state."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import penstock
from penstock.runtime.pipeline_module import parts_of
from tests.distributed.call import call
from tests.side_by_side import same_bits

Make = Callable[..., Optimizer]


class Mixed(nn.Module):
    """A layer with parameters of two types, odd strides, a frozen one and one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(6, 8).t())
        self.frozen = nn.Parameter(torch.randn(100), requires_grad=False)
        self.unused, self.empty = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(0))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.turned) * self.scale


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "mixed": lambda: [
        Mixed(),
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        nn.Linear(8, 8),
        nn.Linear(8, 3),
    ],
    "bare": lambda: [nn.Linear(6, 3, bias=False), nn.Tanh()],
}
"""The last one has a single parameter, and with two stages one has none."""

OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "fused": (torch.optim.AdamW, {"lr": 0.05, "fused": True, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),  # it makes its state at once
    "main weights": (partial(penstock.MainWeights, torch.optim.AdamW), {"lr": 0.05}),
}


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2 * step + replica)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def pipeline(
    mesh: penstock.Mesh, model: str, sharding: str | None, **more: Any
) -> penstock.Pipeline:
    torch.manual_seed(mesh.replica)  # the pipeline makes the replicas equal
    options: dict[str, Any] = {"num_microbatches": 2, "threads_per_stage": 1, "sharding": sharding}
    return penstock.Pipeline(LAYERS[model](), mesh=mesh, loss=nn.MSELoss(), **options, **more)


def optimizer_of(pipe: penstock.Pipeline, name: str) -> Optimizer:
    """Make an optimizer; a stage may have no parameters."""
    make, options = OPTIMIZERS[name]
    return make([{"params": list(pipe.parameters())}], **options)


def train(
    pipe: penstock.Pipeline, optimizer: Optimizer, steps: range, *, scaled: bool
) -> list[float]:
    """Train with a schedule and, if `scaled`, clipping and a scaler that finds an inf on rank 0 in
    the second step; give the losses.
    """
    assert pipe.mesh is not None
    scaler = penstock.GradScaler(pipe, init_scale=1024.0, enabled=scaled)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    losses = []
    for step in steps:
        x, y = batch(step, pipe.mesh.replica)
        losses.append(float(pipe.train_step(x, y, loss_scale=scaler.get_scale())))
        if step == 0:  # gradients of two steps are added up
            pipe.train_step(x, y, loss_scale=scaler.get_scale())
        if scaled and step == 1 and pipe.mesh.rank == 0:
            gradient = next(pipe.parameters()).grad
            assert gradient is not None
            gradient.fill_(torch.inf)
        scaler.unscale_(optimizer)
        if scaled:
            penstock.clip_grad_norm_(pipe, 0.5)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        pipe.eval_step(x)
    return losses


def state_bytes(optimizer: Optimizer) -> int:
    values = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    return sum(v.numel() * v.element_size() for v in values)


def trained(mesh: penstock.Mesh, model: str, name: str, *, scaled: bool) -> dict[str, Any]:
    """Train the same with whole weights and with cut ones; give what both are left with."""
    found: dict[str, Any] = {"case": f"{model} {name} scaled={scaled}"}
    # a norm is summed in another order; a fused kernel rounds the last few of a tensor otherwise
    found["num_replicas"] = mesh.num_replicas
    found["is_exact"] = not scaled and name != "fused"
    for kind, sharding in (("plain", None), ("cut", "zero1")):
        wide = {"gradient_dtype": torch.float32} if name == "main weights" else {}
        pipe = pipeline(mesh, model, sharding, **wide)
        optimizer = optimizer_of(pipe, name)
        losses = train(pipe, optimizer, range(4), scaled=scaled)
        own = {n: p.detach() for n, p in pipe.named_parameters()}
        found[kind] = {
            "losses": losses,
            "parameters": parts_of(pipe).shards.whole(own),
            "held": sum(p.numel() for n, p in own.items() if n != "0.frozen"),
            "bytes": state_bytes(optimizer),
        }
    return found


def resumed(mesh: penstock.Mesh, where: str) -> list[list[float]]:
    """Save with whole weights and with cut ones, and go on from either with either."""
    found = []
    for saved in (None, "zero1"):
        first = pipeline(mesh, "mixed", saved)
        before = optimizer_of(first, "AdamW")
        train(first, before, range(2), scaled=False)
        penstock.save_checkpoint(Path(where) / f"saved-{saved}", first, before)
        for loaded in (None, "zero1"):
            pipe = pipeline(mesh, "mixed", loaded)
            optimizer = optimizer_of(pipe, "AdamW")
            penstock.load_checkpoint(Path(where) / f"saved-{saved}", pipe, optimizer)
            found.append(train(pipe, optimizer, range(2, 4), scaled=False))
    return found


def work(mesh: penstock.Mesh, where: str) -> dict[str, Any]:
    """Train each optimizer once in two replicas of one stage, and in larger meshes also scaled."""
    is_small = mesh.world_size == 2
    whole = ("AdamW", "Adagrad", "main weights") if is_small else OPTIMIZERS
    scaled = ("fused", "SGD") if is_small else ("fused", "SGD", "main weights")
    cases = [("mixed", name, False) for name in whole]
    cases += [("mixed", name, True) for name in scaled]
    if mesh.num_stages <= 2:
        cases.append(("bare", "AdamW", True))
    found = [trained(mesh, model, name, scaled=is_scaled) for model, name, is_scaled in cases]
    return {"trained": found, "resumed": resumed(mesh, where)}


LAYOUTS = [(1, 2), *(pytest.param(k, marks=pytest.mark.slow) for k in ((2, 2), (1, 3)))]


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def by_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("zero")
    return call(work, request.param, folder, where=str(folder))


def test_the_bits_are_those_of_the_plain_optimizer(by_rank: list[Any]) -> None:
    for case in (case for found in by_rank for case in found["trained"]):
        ours, plain = case["cut"], case["plain"]
        for name, parameter in plain["parameters"].items():
            if not case["is_exact"]:
                assert torch.allclose(ours["parameters"][name], parameter, rtol=1e-5), name
            else:
                assert ours["losses"] == plain["losses"], case["case"]
                assert same_bits(ours["parameters"][name], parameter), f"{case['case']}: {name}"


def test_each_replica_keeps_its_share(by_rank: list[Any]) -> None:
    for cases in zip(*(found["trained"] for found in by_rank), strict=True):
        for kept in ("held", "bytes"):
            own, whole = (sum(case[kind][kept] for case in cases) for kind in ("cut", "plain"))
            stages = len(cases) // cases[0]["num_replicas"]
            few = 600 * stages * cases[0]["num_replicas"]  # what is too small to be cut, or frozen
            assert own <= whole / cases[0]["num_replicas"] + few, (kept, cases[0]["case"])
            assert whole == 0 or own < whole, kept


def test_any_layout_goes_on_with_what_another_has_saved(by_rank: list[Any]) -> None:
    for found in by_rank:
        first, *others = found["resumed"]
        assert others == [first] * 3
