"""What each process of a checkpoint test runs.

    python -m tests.distributed.checkpoint_job STAGES REPLICAS save FOLDER
    python -m tests.distributed.checkpoint_job STAGES REPLICAS load FOLDER,FOLDER,...

Both train two steps before and two after the checkpoint, and print the later losses as hex.  With
SHARED=1 in the environment replicas share out the optimizer's state; with STAGES_PER_RANK each
process runs so many stages, and STAGES counts processes.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock import schedules

MICROBATCHES = 4  # of all replicas


def layers() -> list[nn.Module]:
    """Build the model; the same one in every process."""
    torch.manual_seed(0)
    return [
        nn.Linear(6, 8),
        nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.2)),
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        nn.Linear(8, 3),
    ]


def batch(step: int, replica: int, num_replicas: int) -> tuple[Tensor, Tensor]:
    """Give a replica's share of a step's mini-batch."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 6, generator=generator), torch.randn(16, 3, generator=generator)
    return x.chunk(num_replicas)[replica], y.chunk(num_replicas)[replica]  # torch's own word


class Run:
    """A pipeline and its optimizer."""

    def __init__(self, mesh: penstock.Mesh, seed: int = 0) -> None:
        self.mesh, per_rank = mesh, int(os.environ.get("STAGES_PER_RANK", "1"))
        self.pipe = penstock.Pipeline(
            layers(),
            mesh=mesh,
            schedule=schedules.interleaved_1f1b(per_rank) if per_rank > 1 else schedules.gpipe,
            num_microbatches=MICROBATCHES // mesh.num_replicas,
            loss=nn.MSELoss(),
            threads_per_stage=1,
            seed=seed,
            batch_norm_over_replicas=mesh.num_replicas > 1,
        )
        if os.environ.get("SHARED") == "1":
            self.optimizer = penstock.zero_optimizer(self.pipe, torch.optim.AdamW, lr=0.05)
        else:
            self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=0.05)

    def step(self) -> float:
        """Train one step; give its loss."""
        loss = self.pipe.train_step(
            *batch(self.pipe.step, self.mesh.replica, self.mesh.num_replicas)
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


def finish(run: Run) -> str:
    """Train on and give the losses."""
    return " ".join(run.step().hex() for _ in range(2))


def work(mesh: penstock.Mesh, action: str, folders: list[str]) -> list[str]:
    """Save one checkpoint, or load several; give the losses after each."""
    if action == "save":
        run = Run(mesh)
        run.step(), run.step()
        penstock.save_checkpoint(folders[0], run.pipe, run.optimizer, note="hello")
        return [finish(run)]
    found = []
    for folder in folders:
        run = Run(mesh, seed=5)
        state: dict[str, Any] = penstock.load_checkpoint(folder, run.pipe, run.optimizer)
        assert state == {"note": "hello"}
        found.append(finish(run))
    return found


def main() -> None:
    """Do what is asked for."""
    torch.set_num_threads(1)
    stages, replicas, action, folders = sys.argv[1:5]
    with penstock.init_mesh(int(stages), int(replicas), timeout_s=60.0) as mesh:
        for line in work(mesh, action, folders.split(",")):
            sys.stdout.write(f"LOSSES {line}\n")
        assert all(Path(folder).is_dir() for folder in folders.split(","))


if __name__ == "__main__":
    main()
