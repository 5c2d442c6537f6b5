"""Sharding an optimizer's state over replicas changes no bit, and halves the state."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import penstock
from penstock.errors import ConfigError
from penstock.optim.zero import is_sharded, share_of
from tests.distributed.call import call
from tests.distributed.test_crossing import another
from tests.side_by_side import same_bits

Make = Callable[..., Optimizer]


class Mixed(nn.Module):
    """A layer with parameters of two types, odd strides, a frozen one and one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(6, 8).t())
        self.frozen = nn.Parameter(torch.randn(100), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.randn(0))

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
}


def plain(pipe: penstock.Pipeline, make: Make, **options: Any) -> Optimizer:
    """Make an optimizer as a user would without sharding, but for stages without parameters."""
    return make([{"params": list(pipe.parameters())}], **options)


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Give a replica's share of a step's mini-batch."""
    generator = torch.Generator().manual_seed(2 * step + replica)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def pipeline(mesh: penstock.Mesh, model: str) -> penstock.Pipeline:
    torch.manual_seed(mesh.replica)  # the pipeline makes the replicas equal
    return penstock.Pipeline(
        LAYERS[model](), mesh=mesh, num_microbatches=2, loss=nn.MSELoss(), threads_per_stage=1
    )


def train(
    pipe: penstock.Pipeline, optimizer: Optimizer, steps: range, *, scaled: bool
) -> list[float]:
    """Train with a schedule, clipping and, if `scaled`, a scaler that finds an inf on rank 0 in
    the second step; give the losses.
    """
    assert pipe.mesh is not None
    scaler = penstock.GradScaler(pipe, init_scale=1024.0, enabled=scaled)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    losses = []
    for step in steps:
        x, y = batch(step, pipe.mesh.replica)
        losses.append(float(pipe.train_step(x, y, loss_scale=scaler.get_scale())))
        if scaled and step == 1 and pipe.mesh.rank == 0:
            gradient = next(pipe.parameters()).grad
            assert gradient is not None
            gradient.fill_(torch.inf)
        scaler.unscale_(optimizer)
        penstock.clip_grad_norm_(pipe, 0.5)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
    return losses


def state_bytes(optimizer: Optimizer) -> list[int]:
    """Count the bytes of each parameter's state that grow with it."""
    values = [list(state.values()) for state in optimizer.state.values()]
    return [sum(v.numel() * v.element_size() for v in row if v.dim()) for row in values]


def trained(mesh: penstock.Mesh, model: str, name: str, *, scaled: bool) -> dict[str, Any]:
    """Train the same with and without sharding; give what both are left with."""
    make, options = OPTIMIZERS[name]
    found: dict[str, Any] = {"case": f"{model} {name} scaled={scaled}"}
    for kind, factory in (("plain", plain), ("sharded", penstock.zero_optimizer)):
        pipe = pipeline(mesh, model)
        optimizer = factory(pipe, make, **options)
        losses = train(pipe, optimizer, range(4), scaled=scaled)
        names: dict[Tensor, str] = {p: n for n, p in pipe.named_parameters()}
        own = [p for group in share_of(optimizer).param_groups for p in group["params"]]
        found[kind] = {
            "losses": losses,
            "parameters": dict(pipe.named_parameters()),
            "lr": [group["lr"] for group in optimizer.param_groups],
            "own": [names[p] for p in own],
            "state": {names[p]: dict(state) for p, state in optimizer.state.items()},
            "bytes": state_bytes(optimizer),
            "is_sharded": is_sharded(optimizer),
        }
    return found


def resumed(mesh: penstock.Mesh) -> list[list[float]]:
    """Go on from a plain optimizer's state, plainly and sharded; and from the share's own."""
    make, options = OPTIMIZERS["AdamW"]
    first = pipeline(mesh, "mixed")
    before = plain(first, make, **options)
    train(first, before, range(2), scaled=False)
    model, state = first.state_dict(), before.state_dict()
    found = []
    for factory in (plain, penstock.zero_optimizer, penstock.zero_optimizer):
        pipe = pipeline(mesh, "mixed")
        pipe.load_state_dict(model)
        optimizer = factory(pipe, make, **options | {"lr": 7.0})
        optimizer.load_state_dict(copy.deepcopy(state))  # or all would step the same tensors
        if is_sharded(optimizer):
            state = copy.deepcopy(optimizer.state_dict())  # for the last one
        found.append(train(pipe, optimizer, range(2, 4), scaled=False))
    return found


def grown(mesh: penstock.Mesh) -> list[list[float]]:
    """Train with groups, one of them added later, plainly and sharded."""
    found = []
    for factory in (torch.optim.SGD, lambda groups, lr: penstock.zero_optimizer(*groups, lr=lr)):
        pipe = pipeline(mesh, "mixed")
        ours = list(pipe.parameters())
        groups: Any = [{"params": ours[::2]}, {"params": ours[1:2], "lr": 0.01}]
        if factory is not torch.optim.SGD:
            groups = (pipe, torch.optim.SGD, groups)
        optimizer = factory(groups, lr=0.1)
        train(pipe, optimizer, range(1), scaled=False)
        optimizer.add_param_group({"params": ours[3::2], "momentum": 0.5, "initial_lr": 0.1})
        found.append(train(pipe, optimizer, range(1, 3), scaled=False))
    return found


def work(mesh: penstock.Mesh) -> dict[str, Any]:
    """Do all that ends well."""
    cases = [("mixed", name, scaled) for name in OPTIMIZERS for scaled in (False, True)]
    if mesh.num_stages <= 2:
        cases.append(("bare", "AdamW", True))
    return {
        "trained": [trained(mesh, model, name, scaled=scaled) for model, name, scaled in cases],
        "resumed": resumed(mesh),
        "grown": grown(mesh),
        "stage": mesh.stage,
    }


def differing(mesh: penstock.Mesh) -> str:
    """Freeze a parameter on one replica only; give the error."""
    pipe = pipeline(mesh, "mixed")
    if mesh.replica == 1:
        next(pipe.parameters()).requires_grad_(False)
    try:
        penstock.zero_optimizer(pipe, torch.optim.AdamW)
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def failing(mesh: penstock.Mesh) -> str:
    """Let the optimizer of one replica fail in its step; give each rank's error."""

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if mesh.replica == 1:
                raise RuntimeError("boom")
            return super().step(closure)

    pipe = pipeline(mesh, "mixed")
    optimizer = penstock.zero_optimizer(pipe, Failing, lr=0.1)
    try:
        train(pipe, optimizer, range(1), scaled=False)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing failed"


def errors(mesh: penstock.Mesh) -> tuple[str, str]:
    """Return what each rank is told of both, each in a mesh of its own."""
    return differing(mesh), failing(another(mesh))


@pytest.fixture(
    scope="module",
    params=[
        (1, 2),
        pytest.param((2, 2), marks=pytest.mark.slow),
        pytest.param((1, 3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def by_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return call(work, request.param, tmp_path_factory.mktemp("zero"))


def by_stage(by_rank: list[Any], name: str) -> list[list[Any]]:
    """Give what the replicas of each stage found."""
    stages = sorted({found["stage"] for found in by_rank})
    return [[found[name] for found in by_rank if found["stage"] == stage] for stage in stages]


def test_the_bits_are_those_of_the_plain_optimizer(by_rank: list[Any]) -> None:
    for found in by_rank:
        for case in found["trained"]:
            ours, plain = case["sharded"], case["plain"]
            assert ours["losses"] == plain["losses"], case["case"]
            assert ours["lr"] == plain["lr"]
            for name, parameter in plain["parameters"].items():
                assert same_bits(ours["parameters"][name], parameter), f"{case['case']}: {name}"


def test_each_parameters_state_lives_on_one_replica(by_rank: list[Any]) -> None:
    for twins in by_stage(by_rank, "trained"):
        for same_case in zip(*twins, strict=True):
            shares = [case["sharded"] for case in same_case]
            plain = same_case[0]["plain"]
            assert [share["is_sharded"] for share in shares] == [True] * len(shares)
            assert not plain["is_sharded"]
            held = [name for share in shares for name in share["own"]]
            assert sorted(held) == sorted(plain["parameters"])
            assert all(share["state"].keys() <= set(share["own"]) for share in shares)
            stated = [item for share in shares for item in share["state"].items()]
            assert sorted(name for name, _ in stated) == sorted(plain["state"])
            for name, state in stated:
                expected = plain["state"][name]
                assert state.keys() == expected.keys()
                assert all(same_bits(state[key], expected[key]) for key in state)


def test_the_state_is_shared_out_evenly(by_rank: list[Any]) -> None:
    for twins in by_stage(by_rank, "trained"):
        for same_case in zip(*twins, strict=True):
            plain = same_case[0]["plain"]["bytes"]
            shares = [sum(case["sharded"]["bytes"]) for case in same_case]
            assert sum(shares) == sum(plain)
            assert max(shares) <= sum(plain) / len(shares) + max(plain, default=0), shares
            case = same_case[0]["case"]
            if len(by_rank) == 2 and "mixed" in case and "Adagrad" not in case:
                assert max(shares) < 0.55 * sum(plain), shares  # it has state for a frozen one


def test_a_state_goes_on_in_shares(by_rank: list[Any]) -> None:
    for found in by_rank:
        plain, from_whole, from_share = found["resumed"]
        assert plain == from_whole == from_share


def test_groups_may_be_several_and_come_later(by_rank: list[Any]) -> None:
    for found in by_rank:
        plain, sharded = found["grown"]
        assert plain == sharded


def test_replicas_that_differ_are_one_error_and_one_that_fails_is_named_by_the_others(
    tmp_path: Path,
) -> None:
    (differ, healthy), (twin, failed) = call(errors, (1, 2), tmp_path, ends_well=False)
    assert differ == twin
    assert "replica 1 gives it 11" in differ
    assert failed == "RuntimeError: boom"
    assert healthy.startswith("PeerError: rank 1 (stage 0 of replica 1) failed: RuntimeError")
    assert "waited for the parameters that the other replicas step" in healthy
