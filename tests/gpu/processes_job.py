"""One step of a pipeline whose stages are in processes with a GPU each.

python -m tests.gpu.processes_job FOLDER
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


def gradients(pipe: penstock.Pipeline) -> dict[str, Tensor]:
    """Train one step; return the gradients that this process has."""
    pipe.train_step(*batch())
    named = pipe.named_parameters()
    return {name: p.grad.cpu() for name, p in named if p.grad is not None}


def main() -> None:
    """Leave this process's gradients in a file."""
    with penstock.init_mesh(2, device="cuda", timeout_s=60.0) as mesh:
        pipe = penstock.Pipeline(
            model(), mesh=mesh, num_microbatches=4, loss=nn.functional.mse_loss
        )
        torch.save(gradients(pipe), Path(sys.argv[1]) / f"{mesh.rank}.pt")


if __name__ == "__main__":
    main()
