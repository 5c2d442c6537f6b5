"""Three blocks in a list, and whatever is to happen between them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 4


def inputs(batch: int = 3) -> Tensor:
    return torch.linspace(-1, 1, batch * WIDTH).view(batch, WIDTH)


class Chain(nn.Module):
    """Three blocks in a list; subclasses say of which kinds, and what happens between them."""

    kinds: tuple[Callable[..., nn.Module], ...] = (nn.Linear,) * 3

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(WIDTH, WIDTH) for kind in self.kinds)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.between(block(x), number)
        return x

    def between(self, x: Tensor, _number: int) -> Tensor:
        return x


def between(does: Callable[[Any, Any, int], Any], **attributes: Any) -> type[Chain]:
    """Make a kind of chain that does this after each block: does(model, x, number)."""
    return type("Between", (Chain,), {"between": does, **attributes})


def of_blocks(*kinds: Callable[..., nn.Module]) -> Chain:
    """Make a chain of blocks of these kinds, or three of one."""
    made: Chain = type("Made", (Chain,), {"kinds": kinds * (3 if len(kinds) == 1 else 1)})()
    return made


class TwoWays(nn.Module):  # uses what it is given twice
    def __init__(self, *_: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x).float() * self.other(x).float()


class UsedTwice(Chain):
    """Autocast would cast a leaf once for both uses, and does not what another block gave."""

    kinds = (TwoWays,) * 3
