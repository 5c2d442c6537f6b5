"""Steps of a pipeline in processes with a pretended GPU each, or on the CPU.

python -m tests.pretend_devices.processes_job FOLDER DEVICE STAGES REPLICAS SHARDS OPTION=VALUE ...
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock

from .install import pretended_devices
from .ordered_group import ordered_groups

SAMPLES = (16, 16, 16, 24, 24)
"""Samples of each step: the third is as foreseen, and the fourth is not."""


def train(**options: Any) -> dict[str, Any]:
    """Return the loss of each step, and the gradients of the last one."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh()) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(16, 4))
    inputs = torch.randn(SAMPLES[-1], 16)
    pipe = penstock.Pipeline(
        model, num_microbatches=4, loss=nn.functional.mse_loss, seed=1, **options
    )
    found: dict[str, Any] = {}
    for step, number in enumerate(SAMPLES):
        pipe.zero_grad()
        loss = pipe.train_step(inputs[:number], inputs[:number, :4])
        found |= {f"loss {step}": float(loss)}
    named = pipe.named_parameters()
    found |= {name: p.grad.cpu() for name, p in named if p.grad is not None}
    pipe.close()
    return found


def main() -> None:
    """Leave what this process found, and the races, in a file."""
    folder, device, *numbers = sys.argv[1:6]
    options: dict[str, Any] = dict(text.split("=") for text in sys.argv[6:])
    stages, replicas, shards = map(int, numbers)
    if shards > 1:
        options["example_inputs"] = torch.randn(SAMPLES[0], 16)
    with (
        pretended_devices(1) as memory,
        ordered_groups(memory),
        penstock.init_mesh(stages, replicas, shards, device=device, timeout_s=60.0) as mesh,
    ):
        found = train(mesh=mesh, **options)
        torch.save((found, memory.races), Path(folder) / f"{mesh.rank}.pt")


if __name__ == "__main__":
    main()
