"""Processes instead of threads change no bit; replicas change rounding only."""

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import penstock
from penstock.schedules import ALL_SCHEDULES
from penstock.schedules.family import Build
from penstock.types import Recompute, Reduction
from tests.distributed import odd_types
from tests.distributed.call import call
from tests.every_schedule import Dealt, families
from tests.laws.test_accumulation import MOVED_BY_EVALUATION
from tests.models import ALL_MODELS, Model, vectors
from tests.reference import Unsplit, mean, split, total
from tests.side_by_side import same_bits, state_of


class Widen(nn.Module):
    """Give each sample 40,000 rows: (n, 8) -> (n, 40000, 8), more than a megabyte each."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) * torch.linspace(0.1, 1.0, 40_000).unsqueeze(1)


class Narrow(nn.Module):
    """Give the mean over the rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def large_messages() -> list[Any]:
    """Make layers between which a micro-batch is larger than what waits in the kernel."""
    first, last = (nn.Linear(6, 8), Widen()), (Narrow(), nn.Linear(8, 3))
    return [*first, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), *last]


class Shaken(nn.Module):
    """Draw from Python's and NumPy's global generators, or one of them; and from torch's."""

    def __init__(self, *, python: bool = True, arrays: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.python, self.arrays, self.drop = python, arrays, drop

    def forward(self, x: Tensor) -> Tensor:
        if self.python:
            x = x * random.uniform(0.5, 1.5) + random.gauss()
        if self.arrays:
            x = x[numpy.random.permutation(len(x))] * float(numpy.random.randn())
        return nn.functional.dropout(x, self.drop)


def randomness_outside() -> list[Any]:
    """Make layers that draw random numbers that are not torch's."""
    first, second = Shaken(arrays=False), Shaken(python=False)
    last = nn.Sequential(nn.Linear(6, 6), Shaken(), nn.Dropout(0.2))
    return [nn.Linear(6, 6), first, second, Shaken(drop=0.3), last, nn.Linear(6, 3)]


LARGE = Model("large_messages", large_messages, vectors, nn.functional.mse_loss)
OUTSIDE = Model(
    "randomness_outside", randomness_outside, vectors, nn.functional.mse_loss, quiet_in_eval=False
)
BY_NAME = {model.name: model for model in (*ALL_MODELS, LARGE, OUTSIDE)}


@dataclass(frozen=True, slots=True)
class Case:
    """One training run; `num_samples` and `num_microbatches` are of one replica.

    `num_stages` counts processes; `stages_per_rank` of the stages run in each, or those that
    `ranks` gives it, in the schedule "dealt".
    """

    model: str
    schedule: str
    recompute: str
    num_samples: int
    num_microbatches: int
    num_stages: int
    num_replicas: int = 1
    steps: int = 3
    autocast: str = ""
    stages_per_rank: int = 1
    ranks: tuple[int, ...] = ()
    offload: bool = False
    reduction: str = "mean"

    @property
    def schedule_function(self) -> Build:
        """What the pipeline takes."""
        if self.schedule == "dealt":
            return Dealt(tuple(self.ranks))
        return next(f for f in families(self.stages_per_rank) if f.name == self.schedule)

    @property
    def precision(self) -> AbstractContextManager[Any]:
        """What to train under: autocast to the type of that name, or nothing."""
        if not self.autocast:
            return nullcontext()
        return torch.autocast("cpu", getattr(torch, self.autocast))


def batches_of(case: Case, model: Model, replica: int) -> list[Any]:
    """Give a replica's share of the mini-batches: its micro-batches of those of all replicas."""
    whole = model.batches(case.num_samples * case.num_replicas, case.steps)
    if case.num_replicas == 1:
        return whole
    first = case.num_microbatches * replica
    shares = []
    for x, y in whole:
        parts, _ = split(x, case.num_microbatches * case.num_replicas)
        wanted, _ = split(y, case.num_microbatches * case.num_replicas)
        mine = slice(first, first + case.num_microbatches)
        shares.append((torch.cat(parts[mine]), torch.cat(wanted[mine])))
    return shares


def train(case: Case, mesh: penstock.Mesh) -> dict[str, Any]:
    """Accumulate the gradients of several mini-batches."""
    model = BY_NAME[case.model]
    built = model.build()
    if mesh.replica > 0:  # the pipeline must start all replicas equal
        for parameter in nn.ModuleList(built.modules).parameters():
            parameter.data += 1.0
    pipe = penstock.Pipeline(
        built.layers,
        num_stages=len(case.ranks) or None,
        mesh=mesh,
        num_microbatches=case.num_microbatches,
        loss=model.loss,
        schedule=case.schedule_function,
        recompute=Recompute.layers(*range(1, len(built.layers), 2))
        if case.recompute == "layers"
        else Recompute(case.recompute),
        offload=case.offload,
        reduction=Reduction(case.reduction),
        threads_per_stage=1,
        batch_norm_over_replicas=case.num_replicas > 1,
    )
    shares = batches_of(case, model, mesh.replica)
    losses = []
    scaler = penstock.GradScaler(pipe, init_scale=2.0**16, enabled=not case.autocast)
    for batch in shares:
        losses.append(pipe.train_step(*batch, loss_scale=scaler.get_scale()))
        if model.quiet_in_eval and model.name not in MOVED_BY_EVALUATION:
            pipe.eval_step(shares[0][0])
    scaler.unscale_(torch.optim.SGD([{"params": list(pipe.parameters())}]))
    found: dict[str, Any] = {"losses": losses, "norm": penstock.clip_grad_norm_(pipe, 0.5)}
    found.update(state_of(built.modules))
    if model.quiet_in_eval:
        found["outputs"] = pipe.eval_step(shares[0][0])
    return found


def work(mesh: penstock.Mesh, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train every case that is asked for."""
    found = []
    for case in (Case(**fields) for fields in cases):
        with case.precision:
            found.append(train(case, mesh))
    return found


FEW = (
    *("transformer", "structures", "fan_out", "batch_norms", "changing_buffers", "channels_last"),
    *("odd_addresses", "randomness", "frozen_middle", "large_messages"),
    "randomness_outside",
)
RECOMPUTE = [kind.value for kind in Recompute]


def cases(num_stages: int, num_replicas: int, names: tuple[str, ...]) -> list[Case]:
    """Return cases of each model with three schedules; all factors take turns."""
    return [
        Case(name, schedule.name, recompute, 7, 3, num_stages, num_replicas, reduction=reduction)
        for (number, name), turn in product(enumerate(names), range(3))
        for schedule in (ALL_SCHEDULES[(3 * number + turn) % len(ALL_SCHEDULES)],)
        for recompute in (RECOMPUTE[(number + num_stages + turn) % len(RECOMPUTE)],)
        for reduction in (("mean", "sum")[(number + turn) % 2],)
    ]


def several_cases(
    num_ranks: int, stages_per_rank: int, num_replicas: int, names: tuple[str, ...]
) -> list[Case]:
    """Return cases of several stages in each process; schedules take turns."""
    fitting = families(stages_per_rank)
    case = Case("", "", "", 7, 3, num_ranks, num_replicas, stages_per_rank=stages_per_rank)
    return [
        replace(case, model=name, recompute=recompute, schedule=fitting[n % len(fitting)].name)
        for n, (name, recompute) in enumerate(product(names, RECOMPUTE))
    ]


def trained(world: list[Case], tmp_path: Path) -> list[list[dict[str, Any]]]:
    """Run the cases in processes; give the results by rank and case."""
    layout = (world[0].num_stages, world[0].num_replicas)
    return call(work, layout, tmp_path, cases=list(map(asdict, world)))


def unsplit(case: Case) -> dict[str, Any]:
    """Train the same with plain torch, all replicas' micro-batches one after the other."""
    model = BY_NAME[case.model]
    built = model.build()
    weigh = {"mean": mean, "sum": total}[case.reduction]
    num_microbatches = case.num_microbatches * case.num_replicas
    reference = Unsplit(built.modules, built.forward, num_microbatches, weigh)
    whole = model.batches(case.num_samples * case.num_replicas, case.steps)
    losses = [reference.train_step(x, y, model.loss) for x, y in whole]
    gradients = [p.grad for m in built.modules for p in m.parameters() if p.grad is not None]
    norm = torch.stack([g.norm(dtype=torch.float64) for g in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(min(1.0, 0.5 / (float(norm) + 1e-6)))
    found: dict[str, Any] = {
        "losses": losses,
        "norm": norm.float(),
        **dict(state_of(built.modules)),
    }
    if model.quiet_in_eval:
        found["outputs"] = reference.evaluate(whole[0][0])
    return found


@pytest.mark.parametrize("num_stages", (1, 2, 3, pytest.param(4, marks=pytest.mark.slow)))
def test_processes_give_the_unsplit_models_bits(num_stages: int, tmp_path: Path) -> None:
    check_bits(cases(num_stages, 1, FEW), tmp_path)


def test_replicas_start_equal_in_every_type_of_number(tmp_path: Path) -> None:
    first, second = call(odd_types.work, (1, 2), tmp_path)
    assert first.pop("error") == second.pop("error")
    assert first.keys() == second.keys() == {*odd_types.TYPES, "frozen", "weight"}
    assert all(
        same_bits(tensor.to(torch.complex64), second[name].to(torch.complex64))
        for name, tensor in first.items()
    )


@pytest.mark.slow
def test_processes_give_the_unsplit_models_bits_under_autocast(tmp_path: Path) -> None:
    names = ("mlp", "convolutions", "transformer", "fan_out", "changing_buffers")
    pairs = product(("bfloat16", "float16"), cases(2, 1, names))
    check_bits([replace(case, autocast=kind) for kind, case in pairs], tmp_path)


@pytest.mark.parametrize(
    "num_ranks, stages_per_rank",
    ((2, 2), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((1, 3), (2, 3), (3, 2)))),
)
def test_several_stages_in_each_process_give_the_unsplit_models_bits(
    num_ranks: int, stages_per_rank: int, tmp_path: Path
) -> None:
    names = [n for n in FEW if len(BY_NAME[n].layers()) >= num_ranks * stages_per_rank]
    check_bits(several_cases(num_ranks, stages_per_rank, 1, tuple(names)), tmp_path)


@pytest.mark.parametrize(
    "ranks", ((0, 1, 0, 1, 0), pytest.param((0, 1, 1, 0), marks=pytest.mark.slow))
)
def test_any_stages_may_run_on_any_rank(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """Also the first and the last one on the same rank, and neighbours."""
    names = ("transformer", "structures", "fan_out", "batch_norms", "large_messages")
    chosen = [
        Case(name, "dealt", recompute, 7, 3, num_stages=2, ranks=ranks)
        for name, recompute in product(names, RECOMPUTE)
    ]
    check_bits(chosen, tmp_path)


def test_processes_move_what_they_keep_away_and_back(tmp_path: Path) -> None:
    names = ("transformer", "batch_norms", "fan_out")
    chosen = [
        Case(name, "gpipe", recompute, 7, 4, num_stages=2, offload=True)
        for name, recompute in product(names, ("layers", *RECOMPUTE))
    ]
    check_bits(chosen, tmp_path)


def check_bits(chosen: list[Case], tmp_path: Path) -> None:
    for case, *by_rank in zip(chosen, *trained(chosen, tmp_path), strict=True):
        with case.precision:
            expected = unsplit(case)
        assert set().union(*by_rank) == expected.keys()
        for name, value in (item for found in by_rank for item in found.items()):
            ours, theirs = tree_leaves(value), tree_leaves(expected[name])
            assert len(ours) == len(theirs), f"{case}: {name}"
            assert all(map(same_bits, ours, theirs)), f"{case}: {name}"


OWN = "buffer 5."  # of an InstanceNorm: each replica's are of its own samples, as outputs are
REPLICATED = ("transformer", "batch_norms", "randomness", "randomness_outside", "frozen_middle")


@pytest.mark.parametrize(
    "num_stages", (1, *(pytest.param(k, marks=pytest.mark.slow) for k in (2, 3, 4)))
)
def test_two_replicas_give_one_pipelines_gradients_but_for_rounding(
    num_stages: int, tmp_path: Path
) -> None:
    check_replicas(cases(num_stages, 2, REPLICATED), tmp_path)


@pytest.mark.slow
def test_two_replicas_of_several_stages_in_each_process(tmp_path: Path) -> None:
    check_replicas(several_cases(2, 2, 2, REPLICATED), tmp_path)


def check_replicas(chosen: list[Case], tmp_path: Path) -> None:
    num_stages = chosen[0].num_stages
    for case, *by_rank in zip(chosen, *trained(chosen, tmp_path), strict=True):
        expected = unsplit(case)
        for rank, found in enumerate(by_rank):
            assert_close(found, expected, str(case))
            twin = by_rank[(rank + num_stages) % len(by_rank)]
            for name in compared(found):
                ours, theirs = tree_leaves(found[name]), tree_leaves(twin[name])
                assert all(map(same_bits, ours, theirs)), f"{case}: {name} of the replicas"


def compared(found: dict[str, Any]) -> list[str]:
    return [name for name in found if name != "outputs" and not name.startswith(OWN)]


def assert_close(found: dict[str, Any], expected: dict[str, Any], case: str) -> None:
    for name in compared(found):
        for a, b in zip(tree_leaves(found[name]), tree_leaves(expected[name]), strict=True):
            assert (a is None) == (b is None), f"{case}: {name}"
            assert a is None or torch.allclose(a, b, rtol=1e-5, atol=1e-6), f"{case}: {name}"
