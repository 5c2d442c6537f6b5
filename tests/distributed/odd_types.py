"""Replicas of a model with buffers and parameters of types that gloo does not know."""

from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError

TYPES = ("int16", "uint16", "float8_e4m3fn", "float8_e5m2", "bool", "complex64")


class Odd(nn.Module):
    """Scales by a weight; everything else differs between the replicas until they start equal."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        values = torch.arange(start, start + 3)
        for name in TYPES:
            self.register_buffer(name, values.float().to(getattr(torch, name)))
        self.frozen = nn.Parameter(values.float().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.frozen.float()


def work(mesh: penstock.Mesh) -> dict[str, Any]:
    """Train a step; give the state then, and the error about what cannot be trained."""
    options: dict[str, Any] = {"mesh": mesh, "num_microbatches": 2, "loss": nn.MSELoss()}
    pipe = penstock.Pipeline([Odd(5 * mesh.replica)], **options)
    pipe.train_step(torch.ones(4, 3), torch.zeros(4, 3))
    state = {name.removeprefix("0."): tensor for name, tensor in pipe.state_dict().items()}
    trained = Odd(0)
    trained.frozen = nn.Parameter(trained.frozen.detach())
    try:
        penstock.Pipeline([trained], **options)
    except ConfigError as error:
        return {**state, "error": str(error)}
    return state
