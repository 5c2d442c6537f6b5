"""Models whose blocks change the lists, deques and dicts that they are given."""

from collections import UserDict, deque
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.checkpoint import checkpoint

from .chain import Chain, inputs
from .handwritten import Convolved
from .made import AnyModel, pixels


class Fill(nn.Linear):
    """Replaces, moves, adds and removes entries, and returns the list that it was given."""

    def forward(self, xs: list[Tensor], found: dict[str, Any]) -> Any:  # type: ignore[override]
        xs[0] = super().forward(xs[0])
        xs.reverse()
        found["last"] = xs[1]
        found.pop("first", None)
        if self.training:
            found["penalties"].append(xs[1].square().mean())
        found.setdefault("pairs", []).append((xs[1].tanh(), len(found["pairs"])))
        return xs


class Filling(Chain):
    """Goes on with the list as its blocks leave it; what they return is that very list."""

    kinds = (Fill,) * 4

    def forward(self, x: Tensor) -> Tensor:
        xs, penalties = [x, x * 2], [x.mean()]
        found: dict[str, Any] = {"first": x, "penalties": penalties, "pairs": []}
        for block in self.blocks:
            same = block(xs, found)
            same.append(x)
            xs.pop(0)
        y = torch.stack(xs).sum(0) + torch.stack(penalties).sum() + found["last"] + len(found)
        for tanh, number in found["pairs"]:
            y = y + tanh * number
        return y


class Collect(nn.Linear):  # adds what it computes to a deque
    def forward(self, x: Tensor, found: deque[Tensor]) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        found.append(y.square().mean())
        return y


class Collecting(Chain):
    """Gives a deque to its blocks; each is in a checkpoint, which runs it twice."""

    kinds = (Collect,) * 3

    def forward(self, x: Tensor) -> Tensor:
        found: deque[Tensor] = deque(maxlen=2)
        for block in self.blocks:
            x = checkpoint(partial(block, found=found), x, use_reentrant=False).tanh()
        return x + torch.stack([*found]).sum()


class Shared(UserDict[str, Any]):
    """What blocks share, as the keys and values of attention in Gemma 4."""


class Sharing(nn.Linear):  # reads what an earlier block has put there, if one has
    def forward(self, x: Tensor, shared: Shared) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        if "pair" in shared:
            return x + shared["pair"][0] * shared["pair"][1]
        shared["pair"] = x.tanh(), 2
        return x


class SharingPairs(Chain):
    kinds = (Sharing,) * 4

    def forward(self, x: Tensor) -> Tensor:
        shared = Shared()
        for block in self.blocks:
            x = block(x, shared=shared)
        return x


class Fuse(nn.Module):
    """Puts what a branch gives in place of its input, at each resolution, and mixes them all."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        named = {str(number): width for number, width in enumerate(widths)}
        self.branches = nn.ModuleDict({n: Convolved(width, width) for n, width in named.items()})
        self.ways = nn.ModuleDict(
            {n: nn.Conv2d(sum(widths), width, 1) for n, width in named.items()}
        )

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        for number, branch in enumerate(self.branches.values()):
            xs[number] = branch(xs[number])
        return [self.fused(x, way, xs) for x, way in zip(xs, self.ways.values(), strict=True)]

    def fused(self, x: Tensor, way: nn.Module, xs: list[Tensor]) -> Tensor:
        return way(torch.cat([interpolate(other, size=x.shape[-2:]) for other in xs], 1)).relu()


class HighResolution(nn.Module):
    """Resolutions side by side, as in HRNet; it uses a list after blocks have changed it.

    It calls the forward of some blocks itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = Convolved(3, 4)
        self.downs = nn.ModuleList([Convolved(4, 4), Convolved(4, 8), Convolved(8, 8)])
        self.stages = nn.ModuleList([Fuse([4]), Fuse([4, 4]), Fuse([4, 4, 8])])
        self.raises = nn.ModuleList([Convolved(4, 8), Convolved(4, 8), Convolved(8, 8)])
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        xs = [self.stem(x)]
        for down, stage in zip(self.downs, self.stages, strict=True):
            fused = stage(xs)
            xs = [x + y for x, y in zip(xs, fused, strict=True)]
            xs.append(down.forward(xs[-1][..., ::2, ::2]))
        y = torch.cat([raised(x).mean((2, 3)) for raised, x in zip(self.raises, xs, strict=False)])
        return self.head(torch.cat([y.view(3, len(x), 8).sum(0), xs[-1].mean((2, 3))], 1))


FILLING = (
    AnyModel("blocks that change lists and dicts", lambda: (Filling(), inputs)),
    AnyModel("the same, in checkpoints", lambda: (Collecting(), inputs)),
    AnyModel("blocks that change a UserDict", lambda: (SharingPairs(), inputs)),
)
HRNET = AnyModel(
    "high resolution",
    lambda: (HighResolution(), pixels(16)),
    "as HRNet: blocks change the list of resolutions that they are given",
)
