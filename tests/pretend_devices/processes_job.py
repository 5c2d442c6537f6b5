"""Steps of a pipeline in processes with a pretended GPU each, or on the CPU.

python -m tests.pretend_devices.processes_job FOLDER SCHEDULE DEVICE
"""

import sys
from pathlib import Path

import torch
from torch import nn

import penstock

from .install import pretended_devices
from .ordered_group import ordered_groups

SAMPLES = (16, 16, 16, 24, 24)
"""Samples of each step: the third is foreseen, and the fourth is not as foreseen."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


def main() -> None:
    """Leave this process's losses, gradients and races in a file."""
    folder, schedule, device = sys.argv[1:]
    with (
        pretended_devices(1) as memory,
        ordered_groups(memory),
        penstock.init_mesh(device=device, timeout_s=60.0) as mesh,
    ):
        pipe = penstock.Pipeline(
            model(),
            mesh=mesh,
            num_microbatches=4,
            schedule=schedule,
            loss=nn.functional.mse_loss,
        )
        losses = []
        for step, number in enumerate(SAMPLES):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(number, 16, generator=generator)
            losses.append(float(pipe.train_step(inputs, inputs[:, :4])))
        gradients = {n: p.grad.cpu() for n, p in pipe.named_parameters() if p.grad is not None}
        left = {"losses": losses, "gradients": gradients, "races": memory.races}
        torch.save(left, Path(folder) / f"{mesh.rank}.pt")


if __name__ == "__main__":
    main()
