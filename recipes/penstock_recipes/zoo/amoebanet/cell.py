"""A cell of AmoebaNet, which reads the outputs of the two cells before it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock_recipes.zoo.drop_path import DropPath

from .genotype import NUM_INPUTS, CellGenotype, Step
from .operations import OPERATIONS, FactorizedReduction, Norm, convolution

SIDES = ("left", "right")
"""The two operations of a sum."""


@dataclass(frozen=True, slots=True)
class Previous:
    """The output of the last cell but one: its channels, and whether its sides are doubled."""

    channels: int
    is_larger: bool


class Cell(nn.Module):
    """A cell of a genotype with `width` channels in each state.

    `forward(previous, current)` takes the outputs of the last cell but one and of the last one:
    (B, P, H', W') and (B, C, H, W) -> (B, width * number of outputs, H / stride, W / stride),
    rounded up.

    State 1 is `previous`, brought to the resolution of `current` and to `width` channels by a
    factorised reduction or a 1x1 convolution if needed.  The first cell of a network (`previous`
    None) takes `current` there unchanged, and its operations adapt the channels.

    The stride applies to operations on states 0 and 1; the other states are reduced already.
    Drop-path follows every operation except `none`.
    """

    def __init__(  # noqa: PLR0913 - what a cell is, where it stands, and two choices for all cells
        self,
        genotype: CellGenotype,
        width: int,
        stride: int,
        channels: int,
        previous: Previous | None,
        *,
        norm: Norm,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.genotype = genotype
        self.channels = width * len(genotype.outputs)
        self.current = nn.Sequential(*convolution(channels, width, norm))
        self.previous = _adapted(previous, width, norm)
        # The operations on states 0 and 1 have the stride; state 1 may have other channels.
        second = channels if previous is None else width
        # An nn.ModuleList could be mistaken for a list of layers, and divided into stages.
        self.operations = nn.ModuleDict()
        for number, pair in enumerate(genotype.sums, NUM_INPUTS):
            for side, (name, state) in zip(SIDES, pair, strict=True):
                in_channels = second if state == 1 else width
                step = stride if state < NUM_INPUTS else 1
                operation = OPERATIONS[name](in_channels, width, step, norm)
                self.operations[f"state{number}_{side}"] = operation
        self.drop_path = DropPath(drop_path)

    def forward(self, previous_BCHW: Tensor, current_BCHW: Tensor) -> Tensor:
        """Compute all states, and concatenate the outputs."""
        states = [self.current(current_BCHW), self.previous(previous_BCHW)]
        for number, (left, right) in enumerate(self.genotype.sums, NUM_INPUTS):
            first = self._computed(f"state{number}_left", left, states)
            second = self._computed(f"state{number}_right", right, states)
            states.append(first + second)
        return torch.cat([states[number] for number in self.genotype.outputs], dim=1)

    def _computed(self, place: str, step: Step, states: list[Tensor]) -> Tensor:
        result: Tensor = self.operations[place](states[step.state])
        if step.operation != "none":
            result = self.drop_path(result)
        return result


def _adapted(previous: Previous | None, width: int, norm: Norm) -> nn.Module:
    if previous is None:
        return nn.Identity()
    if previous.is_larger:
        return FactorizedReduction(previous.channels, width, norm)
    if previous.channels != width:
        return nn.Sequential(*convolution(previous.channels, width, norm))
    return nn.Identity()
