"""torch's linear and embedding layers with the initial weights of a model's paper.

`reset_parameters` initialises a layer that was built on the meta device, so the initialisation is
there: a model of any size then starts with the right values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

Draw = Callable[[Tensor], object]
"""Fills a weight with random numbers of torch's default generator."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The initialisation of a sublayer: of its input weights, and of its output weights."""

    read: Draw
    write: Draw


def normal(std: float) -> Draw:
    """Return the initialisation by a normal distribution around 0."""
    return partial(nn.init.normal_, std=std)


def xavier(gain: float = 1.0) -> Draw:
    """Return the uniform initialisation in -b to b, b = gain * sqrt(6 / (inputs + outputs))."""
    return partial(nn.init.xavier_uniform_, gain=gain)


class Linear(nn.Linear):
    """A linear layer with weights from `draw`, and biases 0."""

    def __init__(
        self, in_features: int, out_features: int, draw: Draw, *, bias: bool = True
    ) -> None:
        self.draw = draw  # first, as torch's constructor calls reset_parameters
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Initialise weights and biases."""
        _fill(self.weight, self.draw)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """An embedding with vectors from `draw`."""

    def __init__(self, num_embeddings: int, embedding_dim: int, draw: Draw) -> None:
        self.draw = draw
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Initialise the vectors."""
        _fill(self.weight, self.draw)


def _fill(weight: Tensor, draw: Draw) -> None:
    if not weight.is_meta:  # on meta, torch would take a second for nothing
        draw(weight)
