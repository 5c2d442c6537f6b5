"""Steps of a pipeline in processes with a pretended GPU each, or on the CPU.

python -m tests.pretend_devices.processes_job FOLDER DEVICE STAGES REPLICAS SHARDS OPTION=VALUE ...

With FATAL=RANK in the environment that process ends in the forward of step 2, as if killed; the
others leave what they raise.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock
from penstock.errors import PeerError

from .install import pretended_devices
from .ordered_group import ordered_groups

SAMPLES = (16, 16, 16, 24, 24)
"""Samples of each step: the third is as foreseen, and the fourth is not."""


def train(**options: Any) -> dict[str, Any]:
    """Return the loss of each step, and the gradients of the last one."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh()) for _ in range(8)]
    if os.environ.get("FATAL") == os.environ.get("RANK", "-"):
        blocks[-1].register_forward_hook(_Fatal())
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


class _Fatal:
    """Ends the process in the second step."""

    def __init__(self) -> None:
        self._num_calls = 0

    def __call__(self, *_: Any) -> None:
        self._num_calls += 1
        if self._num_calls == 6:
            os._exit(9)


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
        try:
            found = train(mesh=mesh, **options)
        except PeerError as error:
            found = {"error": str(error)}
        torch.save((found, memory.races), Path(folder) / f"{mesh.rank}.pt")


if __name__ == "__main__":
    main()
