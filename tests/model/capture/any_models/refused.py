"""What capture refuses, with what it says: it would be wrong, or cannot be followed."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CaptureError, CutError, GlueError

from .chain import WIDTH, Chain, between


@dataclass(frozen=True, slots=True)
class Refused:  # a model by name, and the error that it gets; `message` is a regular expression
    name: str
    build: Callable[[], Chain]
    error: type[CaptureError]
    message: str


class Remembering(nn.Linear):  # a block that leaves a tensor behind for another one
    memory: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) + sum(self.memory)
        self.memory.append(x.tanh())
        return x


class Sideways(Chain):
    def __init__(self) -> None:
        super().__init__()
        memory: list[Tensor] = []
        self.blocks = nn.ModuleList(Remembering(WIDTH, WIDTH) for _ in range(3))
        for block in self.blocks:
            block.memory = memory  # type: ignore[assignment]  # no module, no tensor

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0].memory.clear()  # type: ignore[operator,union-attr]  # as above
        return super().forward(x)


class Rescaling(Chain):  # halves the weights of its blocks where it does not train, as RWKV does
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            with torch.no_grad():
                next(self.blocks[1].parameters()).div_(2)
        return super().forward(x)


class Counting(Chain):
    count = 0

    def between(self, x: Tensor, _number: int) -> Tensor:
        self.count += 1
        return x * self.count


@dataclass
class Settings:
    kind: str | None = None


class SettingAgain(Chain):  # sets in each forward what depends on its inputs
    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def between(self, x: Tensor, _number: int) -> Tensor:
        self.settings.kind = "tanh" if len(x) > 1 else "sin"
        return getattr(torch, self.settings.kind)(x)


@dataclass(slots=True)
class Slotted:
    calls: int = 0


class CountingElsewhere(Chain):  # counts its calls in an object that is no module
    def __init__(self, made: Callable[[], Any] = Slotted) -> None:
        super().__init__()
        self.state = [made()]

    def between(self, x: Tensor, _number: int) -> Tensor:
        self.state[0].calls += 1
        return x


CALLS = SimpleNamespace(count=0)


class CountingGlobally(Chain):
    def between(self, x: Tensor, _number: int) -> Tensor:
        CALLS.count += 1
        return x


class CountingByClass(Chain):
    calls = 0

    def between(self, x: Tensor, _number: int) -> Tensor:
        CountingByClass.calls += 1
        return x


class Keeping(Chain):
    kept: Tensor

    def between(self, x: Tensor, number: int) -> Tensor:
        if number == 0:
            self.kept = x
        return x + self.kept


class Moving(Chain):  # moves a buffer of its own, as BatchNorm does
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, x: Tensor, _number: int) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


class Normalised(Chain):  # has a module with buffers and no parameters between blocks
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def between(self, x: Tensor, _number: int) -> Tensor:
        return self.norm(x)


class RememberingInside(nn.Module):
    """A block whose parts keep a tensor that the next block's parts read."""

    def __init__(self, memory: list[Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        x = self.second(y + sum(self.memory))
        self.memory[:] = [y.tanh()]
        return x


class SideWay(Chain):
    """Keeps a tensor in a list that all blocks know; they are opened, and the list is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: list[Tensor] = []
        self.blocks = nn.ModuleList(RememberingInside(self.memory) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.memory.clear()
        return super().forward(x)


class ThroughAView(Chain):
    """Writes into a view that was made before a block, and reads what it is a view of."""

    def forward(self, x: Tensor) -> Tensor:
        found = x.new_zeros(len(x), 3, WIDTH)
        second, x = found[:, 1], self.blocks[1](self.blocks[0](x))
        second.copy_(x)
        return self.blocks[2](x) + found.sum(1)


class Differentiating(Chain):  # goes on with the gradient of a block, as models of forces do
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.blocks[1](x).tanh().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return self.blocks[2](force)


def sine(x: Tensor) -> Tensor:
    return x.sin() * 2


with warnings.catch_warnings():  # it is deprecated, and used all the same
    warnings.simplefilter("ignore")
    SINE = torch.jit.script(sine)
SCRIPTED = between(lambda _, x, number: SINE(x))


_GLOBAL: list[Tensor] = []


class ThroughAGlobal(nn.Linear):  # leaves a tensor behind in a global variable
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x) + (_GLOBAL.pop() if _GLOBAL else 0)
        _GLOBAL.append(x.tanh())
        return x


class Globally(Chain):
    kinds = (ThroughAGlobal,) * 3


_WRITES = r"writes a routed value into a tensor .*new_zeros"
_CHANGES = "and it is no block"
_REACHES = r"made inside 'blocks\.0' reaches 'blocks\.1' through an"
_VMAP = r"inside jit\.script, vmap or C\+\+, after 'blocks\.0'"
_WEIGHT = r"changes the parameter 'blocks\.1\.weight' in place .*rescale_every=0"
_VIEW = r"'sum', operation 1 after 'blocks\.2', reads the output .*refused\.py:\d+.*Make the view"
_FORCE = r"'grad', .* computes gradients in the model's forward \(refused\.py:\d+\).*blocks="
MAPPED = between(lambda _, x, number: torch.vmap(torch.sin)(x))
ELSEWHERE = partial(CountingElsewhere, lambda: SimpleNamespace(calls=0))
REFUSED = (
    Refused("a tensor in a list of blocks", Sideways, CutError, _REACHES),
    Refused("a tensor in a global variable", Globally, CutError, _REACHES),
    Refused("vmap between blocks", MAPPED, GlueError, _VMAP),
    Refused("jit.script between blocks", SCRIPTED, GlueError, r"jit\.script"),
    Refused("weights of blocks changed between blocks", Rescaling, CutError, _WEIGHT),
    Refused("a view written into after a block", ThroughAView, CutError, _VIEW),
    Refused("gradients of a block in the forward", Differentiating, CutError, _FORCE),
    Refused("a counter of the model's own", Counting, CutError, _CHANGES),
    Refused("a counter in an object of the model's", ELSEWHERE, CutError, _CHANGES),
    Refused("a setting made in every forward", SettingAgain, CutError, _CHANGES),
    Refused("a counter in slots of an object", CountingElsewhere, CutError, _CHANGES),
    Refused("a counter in a global variable", CountingGlobally, CutError, _CHANGES),
    Refused("a counter of the model's class", CountingByClass, CutError, _CHANGES),
    Refused("a tensor kept by the model itself", Keeping, CutError, _CHANGES),
    Refused("a buffer of the model's own", Moving, CutError, _WRITES),
    Refused("BatchNorm without parameters between blocks", Normalised, CutError, _CHANGES),
)
