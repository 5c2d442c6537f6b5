"""Three blocks in a list, and whatever is to happen between them."""

import torch
from torch import Tensor, nn

WIDTH = 4


def inputs(batch: int = 3) -> Tensor:
    return torch.linspace(-1, 1, batch * WIDTH).view(batch, WIDTH)


class Chain(nn.Module):
    """Three blocks in a list; subclasses say what happens between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.between(block(x), number)
        return x

    def between(self, x: Tensor, _number: int) -> Tensor:
        return x


class TwoWays(nn.Module):
    """Uses what it is given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x).float() * self.other(x).float()


class UsedTwice(Chain):
    """Autocast would cast a leaf once for both uses, and does not what another block gave."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoWays() for _ in range(3))
