"""torch's linear and embedding layers, with weights drawn the way a model's paper says.

A layer that is built on the meta device is made later by its own `reset_parameters`, which is
therefore where the drawing has to be: a model of any size then starts with the right values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

Draw = Callable[[Tensor], object]
"""Fills a weight with random numbers, from torch's default generator."""


@dataclass(frozen=True, slots=True)
class Draws:
    """How the weights of a sublayer are drawn: those that read its input, those that write."""

    read: Draw
    write: Draw


def normal(std: float) -> Draw:
    """Draw from a normal distribution around 0."""
    return partial(nn.init.normal_, std=std)


def xavier(gain: float = 1.0) -> Draw:
    """Draw evenly from between -b and b, where b = gain * sqrt(6 / (inputs + outputs))."""
    return partial(nn.init.xavier_uniform_, gain=gain)


class Linear(nn.Linear):
    """A linear layer whose weights come from `draw`, and whose biases start at 0."""

    def __init__(
        self, in_features: int, out_features: int, draw: Draw, *, bias: bool = True
    ) -> None:
        self.draw = draw  # before the rest: torch's constructor calls reset_parameters
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Draw the first values of weights and biases."""
        _fill(self.weight, self.draw)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table of vectors that come from `draw`."""

    def __init__(self, num_embeddings: int, embedding_dim: int, draw: Draw) -> None:
        self.draw = draw
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        """Draw the first values of the vectors."""
        _fill(self.weight, self.draw)


def _fill(weight: Tensor, draw: Draw) -> None:
    if not weight.is_meta:  # there torch takes a second to find that it has nothing to do
        draw(weight)
