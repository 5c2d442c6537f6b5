"""What optimizers and checkpoints need of a pipeline, which stands above them in imports."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from penstock.mesh import Mesh
from penstock.model.held import Held


@runtime_checkable
class PipelineLike(Protocol):
    """A model of layers of which each process of a mesh may hold only a part: `penstock.Pipeline`.

    `number` is that among the pipelines of the mesh; `step` and `seed` decide what layers draw.
    """

    number: int
    step: int
    seed: int

    @property
    def mesh(self) -> Mesh:
        """Who takes part."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each stage."""

    @property
    def held(self) -> Held:
        """What this process has of the model."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that this process has."""

    def __iter__(self) -> Iterator[nn.Module]:
        """Iterate over the layers."""

    def __len__(self) -> int:
        """Count the layers."""
