"""What each process of a fault test runs: train, saving after every step, and go wrong once.

    python -m tests.distributed.fault_job RANK KIND ACTION REPLICAS FOLDER

In the third step, process RANK raises, is killed (kill -9) or is stopped (SIGSTOP): at the second
instruction of KIND, or the only one; or, with KIND Save, while it writes the checkpoint after that
step.  With RANK none it goes on from the newest checkpoint in FOLDER, to the end.  In the
environment: STAGES_PER_RANK, how many stages each process runs.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock
from penstock import schedules
from penstock.checkpoint import together
from penstock.runtime.executor import Executor
from penstock.schedules import ir
from tests.distributed.train_job import go_wrong

DEADLINE_S = 6.0
STEPS, FAULTY_STEP = 4, 3
ONCE_A_STEP = ("CommitStatistics", "ReduceGradients")


def inject(kind: str, action: str) -> None:
    """Let the executor of this process go wrong when it comes to the instruction."""
    execute, seen = Executor._execute, []

    def faulty(self: Executor, instruction: ir.Instruction) -> None:
        if type(instruction).__name__ == kind and self._run.streams.step == FAULTY_STEP - 1:
            seen.append(instruction)
            if len(seen) == (1 if kind in ONCE_A_STEP else 2):
                go_wrong(action)
        execute(self, instruction)

    Executor._execute = faulty  # type: ignore[method-assign]


def inject_into_save(action: str) -> None:
    """Let this process go wrong when it writes its shard of the faulty step's checkpoint."""
    write = together.save_file  # type: ignore[attr-defined]  # of safetensors

    def faulty(tensors: Any, file: Path) -> None:
        if f"step-{FAULTY_STEP}" in str(file):
            go_wrong(action)
        write(tensors, file)

    together.save_file = faulty  # type: ignore[attr-defined, assignment]


def newest(folder: Path) -> Path | None:
    """Find the newest complete checkpoint."""
    return max(folder.glob("step-*"), default=None)


def train(mesh: penstock.Mesh, num_layers: int, folder: Path) -> int:
    """Train to the end from the newest checkpoint; give the step it was of."""
    torch.manual_seed(0)
    layers: list[Any] = [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2))
        for _ in range(num_layers)
    ]
    per_rank = int(os.environ.get("STAGES_PER_RANK", "1"))
    pipe = penstock.Pipeline(
        layers,
        mesh=mesh,
        schedule=schedules.interleaved_1f1b(per_rank) if per_rank > 1 else schedules.gpipe,
        num_microbatches=3,
        loss=nn.MSELoss(),
        threads_per_stage=1,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05)
    begun_at = newest(folder)
    if begun_at is not None:
        penstock.load_checkpoint(begun_at, pipe, optimizer)
    first = pipe.step
    saving = None
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(10 * step + mesh.replica)
        x, y = (torch.randn(12, 4, generator=generator) for _ in range(2))
        pipe.train_step(x, y)
        optimizer.step()
        optimizer.zero_grad()
        if saving is not None:
            saving.wait()
        saving = penstock.async_save_checkpoint(folder / f"step-{step + 1}", pipe, optimizer)
    if saving is not None:
        saving.wait()
    pipe.close()
    return first


def main() -> None:
    """Train until something goes wrong, or to the end."""
    rank, kind, action, replicas, folder = sys.argv[1:6]
    world = int(os.environ["WORLD_SIZE"])
    num_layers = int(os.environ["NUM_LAYERS"])
    torch.set_num_threads(1)
    mesh = penstock.init_mesh(num_replicas=int(replicas), timeout_s=60.0)
    assert mesh.world_size == world
    if rank != "none":
        mesh.background.timeout_s = DEADLINE_S  # processes may start far apart on a busy machine
    if str(mesh.rank) == rank and kind == "Save":
        inject_into_save(action)
    elif str(mesh.rank) == rank:
        inject(kind, action)
    try:
        train(mesh, num_layers, Path(folder))
    except (penstock.PenstockError, ValueError) as error:
        where = "; ".join(getattr(error, "__notes__", []))
        sys.exit(f"ENDED {type(error).__name__}: {error} {where}")


if __name__ == "__main__":
    main()
