"""Steps of a pipeline whose stages are in processes with a GPU each.

python -m tests.gpu.processes_job FOLDER [graphs]
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import penstock


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 8))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(256, 64, generator=generator), torch.randn(256, 8, generator=generator)


def gradients(pipe: penstock.Pipeline, num_steps: int = 1) -> dict[str, Tensor]:
    """Train steps on the same batch; return the gradients of the last one that are here."""
    for _ in range(num_steps):
        pipe.zero_grad()
        pipe.train_step(*batch())
    named = pipe.named_parameters()
    return {name: p.grad.cpu() for name, p in named if p.grad is not None}


def main() -> None:
    """Leave this process's gradients in a file."""
    with penstock.init_mesh(2, device="cuda", timeout_s=60.0) as mesh:
        graphs = "graphs" in sys.argv
        pipe = penstock.Pipeline(
            model(),
            mesh=mesh,
            num_microbatches=4,
            loss=nn.functional.mse_loss,
            schedule="1f1b",
            cuda_graphs=graphs,
        )
        found = gradients(pipe, num_steps=6 if graphs else 1)
        torch.save(found, Path(sys.argv[1]) / f"{mesh.rank}.pt")


if __name__ == "__main__":
    main()
