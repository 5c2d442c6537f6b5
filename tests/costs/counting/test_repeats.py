"""Equal layers of a chain are counted a few times, and the costs are those of counting all."""

from collections.abc import Callable
from itertools import count
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from penstock import Layer, Profile
from penstock.costs.counting import shortened as shortening
from penstock.costs.counting.graph import Graph
from penstock.runtime.profiling import profile
from penstock_recipes.zoo import gpt, residual_network
from tests.recipes.zoo_members import ZOO_MEMBERS

WIDTH = 4
NUM = 9
Change = Callable[[nn.ModuleList], Any]
"""Changes layers so that some are unlike; returns the list of layers if it is another one."""
ran = list[None]()
"""Grows with each forward of a block."""


class Block(nn.Module):
    """x (2, 4, 4) -> the same shape; what a layer is given may be in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.power, self.more = 1, [1]
        self.activation: Any = nn.functional.relu
        self.seen: Tensor
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        ran.append(None)
        for _ in range(self.power + int(self.seen) + sum(self.more) - 1):
            x = x * x
        y = self.linear(self.norm(x.to(self.linear.weight.dtype)))
        return self.drop(self.activation(y)).float() + x


def both(layers: Any, inputs: Any, **options: Any) -> tuple[list[tuple[Profile, Graph, int]], int]:
    """Return the profile, the graph and the number of blocks run, shortened and not; and how many
    layers are left out.
    """

    def found() -> tuple[Profile, Graph, int]:
        ran.clear()
        own = profile(layers, inputs, measure=False, **options)
        return own, own.operators.graph_of(own.sizes[0].microbatch_size), len(ran)

    left_out, shortened = 0, shortening.shortened
    with pytest.MonkeyPatch.context() as patch:

        def noted(*arguments: Any) -> Any:
            nonlocal left_out
            short = shortened(*arguments)
            left_out = sum(len(repeat.paths) for repeat in short[1])
            return short

        patch.setattr(shortening, "shortened", noted)
        short = found()
        patch.setattr(shortening, "shortened", lambda layers, own=(): (layers, ()))
        return [short, found()], left_out


def check_equal(layers: Any, inputs: Any, **options: Any) -> tuple[int, bool]:
    """Compare both counts; return how many layers were left out, and whether fewer ran."""
    (short, whole), left_out = both(layers, inputs, **options)
    for own, other in zip(short[0].sizes, whole[0].sizes, strict=True):
        assert own == other
    assert short[0] == whole[0]
    assert short[1] == whole[1]
    return left_out, short[2] < whole[2]


def changed(name: str, value: Any, *path: str) -> Change:
    """Return the change of an attribute of the layer in the middle."""

    def change(layers: nn.ModuleList) -> None:
        owner: Any = layers[NUM // 2]
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, value)

    return change


def tied(layers: Any) -> None:
    layers[4].linear.weight = layers[6].linear.weight


def tied_to_the_first(layers: Any) -> None:
    layers[4].linear.weight = layers[0].linear.weight


def one_list(layers: Any) -> None:
    for layer in layers:
        layer.more = layers[0].more


def one_iterator(layers: Any) -> None:
    shared = count()
    for layer in layers:
        layer.numbers = shared


def frozen(layers: Any) -> None:
    layers[4].linear.weight.requires_grad_(False)


def hooked(layers: Any) -> None:
    layers[4].linear.register_forward_hook(lambda module, args, result: result * 2)


def lower(layers: Any) -> None:
    layers[4].linear.bfloat16()
    layers[4].norm.bfloat16()


def counted_up(layers: Any) -> None:
    layers[4].seen += 1


def same_module(layers: Any) -> list[nn.Module]:
    return [*layers[:4], layers[2], *layers[4:]]


class Add(nn.Module):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return x + skip


UNLIKE: tuple[tuple[Change, int], ...] = (
    (lambda layers: None, 3),
    (changed("p", 0.2, "drop"), 0),
    (changed("eps", 1e-3, "norm"), 0),
    (changed("training", False, "drop"), 0),
    (changed("power", 2), 0),
    (changed("power", True), 0),
    (changed("activation", nn.functional.gelu), 0),
    (changed("activation", lambda x: x), 0),
    (changed("more", [2]), 0),
    (one_list, 0),
    (one_iterator, 0),
    (lower, 0),
    (frozen, 0),
    (counted_up, 0),
    (tied, 0),
    (tied_to_the_first, 0),
    (same_module, 0),
)


@pytest.mark.parametrize(("change", "left_out"), UNLIKE)
def test_unlike_layers_are_counted_each(change: Change, left_out: int) -> None:
    layers = nn.ModuleList(Block() for _ in range(NUM))
    chain = change(layers) or [*layers]
    inputs = torch.empty(2, WIDTH, WIDTH)
    assert check_equal(chain, inputs, microbatch_sizes=(1, 2)) == (left_out, left_out > 0)


def test_a_hook_is_counted_where_hooks_run() -> None:
    """Those of the user run in shards, and are left out of profiles."""
    layers = nn.ModuleList(Block() for _ in range(NUM))
    hooked(layers)
    assert check_equal([*layers], torch.empty(2, WIDTH, WIDTH)) == (0, True)


def around(layers: Any) -> list[Any]:
    """Return a chain in which a value passes by a run, and all comes to the loss."""
    first, last = Layer(nn.Tanh(), outputs="skip"), Layer(Add(), inputs=("end", "skip"))
    return [first, *layers[:-1], Layer(layers[-1], outputs="end"), last, nn.Flatten()]


def test_values_that_pass_a_run_are_used_behind_it() -> None:
    layers = nn.ModuleList(Block() for _ in range(NUM))
    options = {"loss": nn.functional.mse_loss, "targets": torch.empty(2, WIDTH * WIDTH)}
    assert check_equal(around(layers), torch.empty(2, WIDTH, WIDTH), **options) == (4, True)
    assert check_equal(inside(layers), torch.empty(2, WIDTH, WIDTH)) == (0, False)


def inside(layers: Any) -> list[Any]:
    """Return a chain in which a value from inside a run is used behind it."""
    middle, end = Layer(layers[4], outputs="skip"), Layer(layers[8], outputs="end")
    return [*layers[:4], middle, *layers[5:8], end, Layer(Add(), inputs=("end", "skip"))]


class Turned(nn.Module):
    """Gives values, or gradients, in another order of memory every time."""

    turn: ClassVar[Callable[[Tensor], Tensor]]

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.empty(WIDTH)), nn.Linear(WIDTH, WIDTH)
        type(self).turn = staticmethod(function)

    def forward(self, x: Tensor) -> Tensor:
        ran.append(None)
        return type(self).turn(x * self.weight)


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.transpose(1, 2) if grad.is_contiguous() else grad.contiguous()


@pytest.mark.parametrize(
    "turn",
    (
        lambda x: x.transpose(1, 2) if x.is_contiguous() else x.contiguous(),
        Back.apply,
        lambda x: torch.cat((x, x[:, :1]), 1),
    ),
    ids=("values", "gradients", "sizes"),
)
def test_equal_layers_that_are_given_unlike_values_are_counted_each(turn: Any) -> None:
    layers = nn.Sequential(*(Turned(turn) for _ in range(NUM)))
    left_out, is_short = check_equal(layers, torch.empty(2, WIDTH, WIDTH))
    assert left_out == 3 and not is_short


def models() -> dict[str, tuple[Any, Any]]:
    words = torch.zeros(2, 8, dtype=torch.long)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    norms = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(7)]
    return {
        "gpt": (gpt(num_layers=8, width=16, num_heads=2, num_words=9, max_length=8), words),
        "encoder": (
            nn.Sequential(nn.Tanh(), *nn.TransformerEncoder(encoder, 9).layers, nn.ReLU()),
            torch.empty(2, 4, 16),
        ),
        "residual": (residual_network(9, 4), torch.empty(2, 1, 8, 8)),
        "two runs": (
            nn.Sequential(
                nn.Linear(4, 4), *(nn.ReLU() for _ in range(9)), *norms, nn.Linear(4, 3)
            ),
            torch.empty(2, 4),
        ),
        "views": (
            nn.Sequential(nn.Linear(4, 4), *(nn.Flatten() for _ in range(9)), nn.ReLU()),
            torch.empty(2, 4),
        ),
        "in place": (
            nn.Sequential(nn.Linear(4, 4), *(nn.ReLU(inplace=True) for _ in range(9)), nn.Tanh()),
            torch.empty(2, 4),
        ),
    }


@pytest.mark.parametrize("name", [*models(), "gpt, tied", "unet"])
def test_models_cost_what_all_their_layers_do(name: str) -> None:
    model, inputs = models().get(name) or ZOO_MEMBERS[name]()
    check_equal(model, inputs)


class Settings:
    """What all blocks of a model share, as a configuration."""

    def __init__(self) -> None:
        self.scale, self.later = 2.0, [6]


class Numbered(Block):
    """x (2, 4, 4), scale (4,) or a number for each block -> as x."""

    def __init__(self, number: int, settings: Settings) -> None:
        super().__init__()
        self.number, self.settings = number, settings

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if scale is not None:
            x = x * scale
        return super().forward(x) * self.settings.scale


class Reads(Numbered):
    """A block that does more from a number on."""

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = super().forward(x, scale)
        return x.exp() if self.number in self.settings.later else x


class Model(nn.Module):
    """A model that calls its blocks in a loop: x (2, 4, 4) -> (2, 4, 4)."""

    kind: type[Numbered] = Numbered

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, settings = nn.Linear(WIDTH, WIDTH), nn.Linear(4, 4), Settings()
        self.blocks = nn.ModuleList(self.kind(n, settings) for n in range(NUM))

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class ReadsNumbers(Model):
    kind = Reads


class SharesAScale(Model):
    """What a call between blocks makes goes to each block."""

    def forward(self, x: Tensor) -> Tensor:
        scale, x = torch.arange(WIDTH), self.first(x)
        for block in self.blocks:
            x = block(x, scale)
        return self.last(x)


class TrainsTheScale(Model):
    """Each block adds to the gradient of what all take."""

    def forward(self, x: Tensor) -> Tensor:
        x = scale = self.first(x)
        for block in self.blocks:
            x = block(x, scale)
        return self.last(x)


class HasScales(Model):
    """Each block has another input of its own."""

    def forward(self, x: Tensor) -> Tensor:
        scales = [torch.ones(WIDTH if n < NUM // 2 else 1) for n in range(NUM)]
        x = self.first(x)
        for block, scale in zip(self.blocks, scales, strict=True):
            x = block(x, scale)
        return self.last(x)


class AddsBetween(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class ReturnsAll(Model):
    def forward(self, x: Tensor) -> Any:
        every = [self.first(x)]
        for block in self.blocks:
            every.append(block(every[-1]))
        return self.last(every[-1]), every


class TakesAllAtTheEnd(Model):
    def forward(self, x: Tensor) -> Tensor:
        every = [self.first(x)]
        for block in self.blocks:
            every.append(block(every[-1]))
        return self.last(torch.stack(every).sum(0))


@pytest.mark.parametrize(
    ("kind", "is_short"),
    [
        pytest.param(kind, is_short, id=kind.__name__)
        for kind, is_short in (
            (Model, True),
            (SharesAScale, True),
            (ReadsNumbers, False),
            (TrainsTheScale, False),
            (HasScales, False),
            (AddsBetween, False),
            (ReturnsAll, False),
            (TakesAllAtTheEnd, False),
        )
    ],
)
def test_blocks_of_a_captured_model_are_counted_a_few_times_where_all_are_alike(
    kind: type[Model], is_short: bool
) -> None:
    model, inputs = kind(), torch.empty(2, WIDTH, WIDTH)
    left_out, fewer_ran = check_equal(model, inputs)
    assert (left_out, fewer_ran) == (NUM - 4, is_short)
    assert [vars(block)["number"] for block in model.blocks] == [*range(NUM)]
