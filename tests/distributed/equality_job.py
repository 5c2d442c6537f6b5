"""What each process of an equality test runs: train every case, and leave its results in a file.

python -m tests.distributed.equality_job CASES.json FOLDER
"""

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.schedules import ALL_SCHEDULES, interleaved_1f1b
from penstock.schedules.family import Build
from tests.every_schedule import Dealt
from tests.models import ALL_MODELS, Built, Model, vectors
from tests.reference import split


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


LARGE = Model("large_messages", large_messages, vectors, nn.functional.mse_loss)
BY_NAME = {model.name: model for model in (*ALL_MODELS, LARGE)}


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

    def write(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def schedule_function(self) -> Build:
        """What the pipeline takes."""
        if self.schedule == "interleaved_1f1b":
            return interleaved_1f1b(self.stages_per_rank)
        if self.schedule == "dealt":
            return Dealt(tuple(self.ranks))
        return next(f for f in ALL_SCHEDULES if f.name == self.schedule)

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


def results(built: Built, losses: list[Tensor]) -> dict[str, Any]:
    """Gather what a process is left with, by layer number and name."""
    found: dict[str, Any] = {"losses": losses, "outputs": None}
    for number, module in enumerate(built.modules):
        if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            continue
        _gather(found, number, module)
    return found


def _gather(found: dict[str, Any], number: int, module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        found[f"gradient {number}.{name}"] = parameter.grad
    for name, buffer in module.named_buffers():
        found[f"buffer {number}.{name}"] = buffer


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
        recompute=penstock.Recompute(case.recompute),
        threads_per_stage=1,
        batch_norm_over_replicas=case.num_replicas > 1,
    )
    shares = batches_of(case, model, mesh.replica)
    losses = [pipe.train_step(*batch) for batch in shares]
    norm = penstock.clip_grad_norm_(pipe, 0.5)
    found = results(built, losses) | {"norm": norm}
    if model.quiet_in_eval:
        found["outputs"] = pipe.eval_step(shares[0][0])
    return found


def main() -> None:
    """Train every case that is asked for."""
    cases = [Case(**case) for case in json.loads(Path(sys.argv[1]).read_text())]
    torch.set_num_threads(1)
    with penstock.init_mesh(
        cases[0].num_stages, cases[0].num_replicas, timeout_s=60.0, device="cpu"
    ) as mesh:
        found = []
        for case in cases:
            with case.precision:
                found.append(train(case, mesh))
        torch.save(found, Path(sys.argv[2]) / f"{mesh.rank}.pt")


if __name__ == "__main__":
    main()
