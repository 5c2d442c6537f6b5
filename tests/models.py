"""The test models: each is small, has four layers or more, and adding one here buys every law."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from penstock import Layer
from tests import model_parts as parts
from tests.model import recent
from tests.reference import Forward, Loss, chain

Batch = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Built:
    """One fresh copy of a model: as the pipeline takes it, and as plain modules with a forward."""

    layers: list[Any]
    modules: list[nn.Module]
    forward: Forward


@dataclass(frozen=True, slots=True)
class Model:
    """How to build a model (the same weights each time), feed it and judge it.

    `min_samples` is the smallest micro-batch it can train on (BatchNorm1d needs 2).  Models that
    draw random numbers in evaluation too have `quiet_in_eval` False.  `gradient_dtype` is that of
    gradients of weights of lower precision.
    """

    name: str
    layers: Callable[[], list[Any]]
    batch: Callable[[int, torch.Generator], Batch]
    loss: Loss
    forward: Forward | None = None
    min_samples: int = 1
    quiet_in_eval: bool = True
    gradient_dtype: torch.dtype | None = None

    def build(self) -> Built:
        """Build the model; the default generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = self.layers()
        modules = [layer.module if isinstance(layer, Layer) else layer for layer in layers]
        return Built(layers, modules, self.forward or chain(len(layers)))

    def build_unsplit(self) -> Built:
        """Build the model with torch's own `grad_dtype`, as plain torch trains it."""
        built = self.build()
        for parameter in nn.ModuleList(built.modules).parameters():
            if self.gradient_dtype is not None and parameter.element_size() < 4:
                parameter.grad_dtype = self.gradient_dtype
        return built

    def batches(self, num_samples: int, count: int) -> list[Batch]:
        """Give `count` different mini-batches, the same ones each time."""
        generator = torch.Generator().manual_seed(num_samples)
        return [self.batch(num_samples, generator) for _ in range(count)]

    def __repr__(self) -> str:
        return self.name


def vectors(n: int, g: torch.Generator) -> Batch:
    """Give (n, 6) numbers and (n, 3) targets."""
    return torch.randn(n, 6, generator=g), torch.randn(n, 3, generator=g)


def images(n: int, g: torch.Generator) -> Batch:
    """Give (n, 2, 8, 8) images and one of 3 classes for each."""
    return torch.randn(n, 2, 8, 8, generator=g), torch.randint(3, (n,), generator=g)


def channels_last_images(n: int, g: torch.Generator) -> Batch:
    """Give images whose channels lie next to each other in memory."""
    x, y = images(n, g)
    return x.contiguous(memory_format=torch.channels_last), y


def tokens(n: int, g: torch.Generator) -> Batch:
    """Give (n, 5) token ids of 11, and the same many to predict."""
    ids = torch.randint(11, (n, 6), generator=g)
    return ids[:, :-1], ids[:, 1:]


def series(n: int, g: torch.Generator) -> Batch:
    """Give (n, 5, 4) time series and one of 3 classes for each."""
    return torch.randn(n, 5, 4, generator=g), torch.randint(3, (n,), generator=g)


def pairs(n: int, g: torch.Generator) -> Batch:
    """Give a dict of inputs and a tuple of targets; lists and arrays have an entry per sample."""
    x, y = vectors(n, g)
    signs = numpy.where(numpy.arange(n) % 3, 1.0, -1.0)
    words = ["ab"[: row % 3] for row in range(n)]
    batch = {"x": x, "rows": torch.arange(n), "factor": 2, "signs": signs, "words": words}
    return batch, (y, torch.ones(n, 3), list(range(n)))


def token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Give the mean cross-entropy over all tokens."""
    return F.cross_entropy(scores.transpose(1, 2), targets)


def mlp() -> list[Any]:
    return [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)]


def convolutions() -> list[Any]:
    return [
        nn.Conv2d(2, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        parts.Residual(
            nn.Conv2d(6, 6, 3, padding=1, groups=3), nn.GroupNorm(2, 6), nn.ReLU(inplace=True)
        ),
        nn.MaxPool2d(2),
        parts.Residual(
            nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 1), nn.Dropout2d(0.3)
        ),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    ]


def transformer() -> list[Any]:
    def block() -> nn.Module:
        mlp = parts.Residual(
            nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.1)
        )
        return nn.Sequential(parts.Residual(nn.LayerNorm(8), parts.Attention(8, 2)), mlp)

    return [parts.Tokens(11, 5, 8), block(), block(), nn.LayerNorm(8), nn.Linear(8, 11)]


def multihead() -> list[Any]:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return [parts.Tokens(11, 5, 8), parts.SelfAttention(8, 2), encoder, nn.Linear(8, 11)]


def lstm() -> list[Any]:
    return [nn.Linear(4, 5), parts.Lstm(5, 5), parts.Lstm(5, 5), parts.LstmHead(5, 3)]


class _FromDict(nn.Module):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        picked: Tensor = batch["x"] * batch["factor"] + batch["rows"].unsqueeze(1)
        lengths = torch.tensor([float(len(word)) for word in batch["words"]])
        return picked * torch.from_numpy(batch["signs"]).float()[:, None] + lengths[:, None]


def structures() -> list[Any]:
    return [
        _FromDict(),
        nn.Linear(6, 6),
        parts.ToDict(6),
        parts.DictToPair(6),
        parts.PairToNamed(6),
        parts.NamedToTuple(6),
        parts.TupleToTensor(6, 3),
    ]


def unet() -> list[Any]:
    return [
        Layer(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), outputs="outer"),
        Layer(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), outputs="inner"),
        nn.Linear(8, 8),
        Layer(nn.Tanh(), outputs="middle"),
        Layer(parts.Concatenate(16, 8), inputs=("middle", "inner"), outputs="up"),
        Layer(parts.Concatenate(16, 8), inputs=("up", "outer"), outputs="top"),
        Layer(parts.Concatenate(14, 3), inputs=("top", "input")),
    ]


def unet_forward(call: Callable[..., Any], x: Any) -> Any:
    outer = call(0, x)
    inner = call(1, outer)
    middle = call(3, call(2, inner))
    return call(6, call(5, call(4, middle, inner), outer), x)


def fan_out() -> list[Any]:
    return [
        Layer(parts.TwoValues(6), outputs=("shared", "x")),
        Layer(parts.Twice(6), inputs=("x", "shared"), outputs="x"),
        Layer(parts.Twice(6), inputs=("shared", "shared"), outputs="y"),
        Layer(parts.Concatenate(18, 6), inputs=("x", "y", "shared"), outputs="z"),
        Layer(parts.Concatenate(18, 3), inputs=("z", "shared", "y"), name="last"),
    ]


def fan_out_forward(call: Callable[..., Any], inputs: Any) -> Any:
    shared, x = call(0, inputs)
    x = call(1, x, shared)
    y = call(2, shared, shared)
    return call(4, call(3, x, y, shared), shared, y)


def odd_parameters() -> list[Any]:
    return [parts.Odd(6), nn.PReLU(), parts.Odd(6), parts.Tied(6), nn.Linear(6, 3)]


def bfloat16() -> list[Any]:
    narrow = nn.Sequential(parts.Does(Tensor.bfloat16), nn.Linear(8, 8), nn.LayerNorm(8))
    stack = [nn.Linear(6, 8), narrow, parts.Tied(8), parts.Odd(8), nn.Linear(8, 3)]
    nn.ModuleList(stack[1:]).bfloat16()
    return [*stack, nn.Sequential(parts.Does(Tensor.float), nn.Linear(3, 3))]


def frozen(*which: int) -> Callable[[], list[Any]]:
    def layers() -> list[Any]:
        stack = [
            nn.Linear(6, 6),
            nn.LayerNorm(6),
            nn.Linear(6, 6),
            nn.Tanh(),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        ]
        for number in which:
            stack[number].requires_grad_(False)
        return stack

    return layers


def batch_norms() -> list[Any]:
    return [
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.BatchNorm2d(4, affine=False, momentum=0.3),
        nn.InstanceNorm2d(4, track_running_stats=True),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 3)),
    ]


def frozen_batch_norm() -> list[Any]:
    stack = [
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.BatchNorm1d(8),
        nn.Linear(8, 3),
    ]
    stack[1].eval()
    return stack


def changing_buffers() -> list[Any]:
    return [
        nn.Linear(6, 6),
        parts.Ema(6, in_place=True),
        parametrizations.spectral_norm(nn.Linear(6, 6)),
        parts.Ema(6, in_place=False),
        nn.utils.spectral_norm(nn.Linear(6, 6)),
        parametrizations.weight_norm(nn.Linear(6, 3)),
    ]


def changing_attributes() -> list[Any]:
    return [
        nn.Linear(6, 6),
        parts.EmaAttribute(6, in_place=False),
        nn.Linear(6, 6),
        parts.EmaAttribute(6, in_place=True),
        nn.Linear(6, 3),
    ]


def channels_last() -> list[Any]:
    stack = nn.Sequential(
        nn.Conv2d(2, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 3, 2),
        nn.Flatten(),
    )
    return list(stack.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def in_place() -> list[Any]:
    return [
        parts.InPlaceAffine(),
        nn.Linear(6, 8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        parts.InPlaceAffine(),
        nn.Dropout(0.2, inplace=True),
        parts.InPlaceAffine(),
        nn.Linear(8, 3),
        nn.LeakyReLU(inplace=True),
    ]


def views() -> list[Any]:
    return [
        nn.Identity(),
        nn.Linear(6, 6),
        nn.Identity(),
        parts.InPlaceAffine(),
        parts.Heads(),
        parts.InPlaceAffine(),
        nn.Linear(2, 2),
        parts.Unheads(),
        parts.Expanded(),
        nn.Linear(6, 3),
        parts.Pooled(),
    ]


def odd_addresses() -> list[Any]:
    return [
        parts.Columns(1, 1),
        nn.Linear(5, 9),
        parts.Columns(1, 1),
        nn.Linear(8, 8),
        parts.Columns(1, 2),
        nn.Linear(4, 7),
        parts.Columns(1, 1),
        parts.InPlaceAffine(),
        nn.Linear(6, 3),
    ]


def randomness() -> list[Any]:
    return [
        nn.Linear(6, 8),
        parts.Noise(),
        parts.StochasticDepth(nn.Linear(8, 8)),
        nn.AlphaDropout(0.2),
        nn.RReLU(),
        nn.Linear(8, 3),
    ]


def without_weights() -> list[Any]:
    return [nn.Tanh(), nn.Linear(6, 3), nn.Tanh(), nn.Softmax(dim=1), nn.Identity()]


def attention_residuals() -> list[Any]:
    earlier = tuple(f"v{number}" for number in range(5))
    bodies = [nn.Tanh(), recent.mlp(8), nn.Linear(8, 8), recent.mlp(8)]
    return [
        Layer(nn.Linear(6, 8), outputs="v0"),
        *(
            Layer(recent.Mixed(8, body), inputs=earlier[:n], outputs=f"v{n}")
            for n, body in enumerate(bodies, 1)
        ),
        Layer(recent.Mixed(8, nn.Linear(8, 3)), inputs=earlier),
    ]


def attention_residuals_forward(call: Callable[..., Any], x: Any) -> Any:
    earlier = [call(0, x)]
    for number in range(1, 5):
        earlier.append(call(number, *earlier))
    return call(5, *earlier)


def deepstack() -> list[Any]:
    return [
        Layer(recent.Patches(8), outputs="p1"),
        Layer(recent.mlp(8), inputs="p1", outputs="p2"),
        Layer(recent.block(8), inputs="p2", outputs="p3"),
        Layer(recent.WordsAfterPatches(11, 8), inputs=("input", "p3"), outputs="h1"),
        Layer(recent.Deepstack(8), inputs=("h1", "p1"), outputs="h2"),
        Layer(recent.Deepstack(8), inputs=("h2", "p2"), outputs="h3"),
        nn.Linear(8, 11),
    ]


def deepstack_forward(call: Callable[..., Any], batch: Any) -> Any:
    first = call(0, batch)
    second = call(1, first)
    x = call(3, batch, call(2, second))
    return call(6, call(5, call(4, x, first), second))


def images_and_words(n: int, g: torch.Generator) -> Batch:
    """Give images and words, and a word to predict at each place."""
    batch = {"images": images(n, g)[0], "ids": tokens(n, g)[0]}
    return batch, torch.randint(11, (n, 9), generator=g)


def tokens_ahead() -> list[Any]:
    return [
        Layer(nn.Embedding(11, 8), outputs="embedded"),
        recent.mlp(8),
        Layer(recent.block(8), outputs="next"),
        Layer(recent.Ahead(8), inputs=("next", "embedded"), outputs="second"),
        Layer(recent.Ahead(8), inputs=("second", "embedded"), outputs="third"),
        Layer(recent.Unembedding(8, 11), inputs=("next", "second", "third")),
    ]


def tokens_ahead_forward(call: Callable[..., Any], ids: Any) -> Any:
    embedded = call(0, ids)
    following = call(2, call(1, embedded))
    second = call(3, following, embedded)
    return call(5, following, second, call(4, second, embedded))


def loss_of_all_heads(scores: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """Give the sum of the losses of the next token, of the second and of the third."""
    losses = [token_loss(of, targets[:, targets.shape[1] - of.shape[1] :]) for of in scores]
    return torch.stack(losses).sum()


def experts() -> list[Any]:
    return [
        parts.Tokens(11, 5, 8),
        Layer(recent.Experts(8), outputs=("x", "loss")),
        Layer(parts.SelfAttention(8, 2), inputs="x", outputs="x"),
        Layer(recent.ExpertsAfter(8), inputs=("x", "loss"), outputs=("x", "loss")),
        Layer(recent.ScoresAndLoss(8, 11), inputs=("x", "loss")),
    ]


def experts_forward(call: Callable[..., Any], ids: Any) -> Any:
    x, loss = call(1, call(0, ids))
    return call(4, *call(3, call(2, x), loss))


def loss_with_routers(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Give the loss of the tokens and a part of the auxiliary loss of the routers."""
    scores, of_routers = output
    return token_loss(scores, targets) + 0.1 * of_routers.mean()


def _pair_loss(output: Tensor, target: tuple[Tensor, Tensor, list[int]]) -> Tensor:
    return F.mse_loss(output * target[1], target[0] + torch.tensor(target[2])[:, None])


ALL_MODELS = (
    Model("mlp", mlp, vectors, F.mse_loss),
    Model("convolutions", convolutions, images, F.cross_entropy),
    Model("transformer", transformer, tokens, token_loss),
    Model("multihead", multihead, tokens, token_loss),
    Model("lstm", lstm, series, F.cross_entropy),
    Model("structures", structures, pairs, _pair_loss),
    Model("unet", unet, vectors, F.mse_loss, unet_forward),
    Model("fan_out", fan_out, vectors, F.mse_loss, fan_out_forward),
    Model("odd_parameters", odd_parameters, vectors, F.mse_loss),
    Model("frozen_prefix", frozen(0, 1), vectors, F.mse_loss),
    Model("frozen_middle", frozen(1, 2, 4), vectors, F.mse_loss),
    Model("frozen_but_first", frozen(1, 2, 3, 4, 5), vectors, F.mse_loss),
    Model("batch_norms", batch_norms, images, F.cross_entropy),
    Model("frozen_batch_norm", frozen_batch_norm, vectors, F.mse_loss, min_samples=2),
    Model("changing_buffers", changing_buffers, vectors, F.mse_loss),
    Model("changing_attributes", changing_attributes, vectors, F.mse_loss),
    Model("channels_last", channels_last, channels_last_images, F.cross_entropy),
    Model("in_place", in_place, vectors, F.mse_loss),
    Model("views", views, vectors, F.mse_loss),
    Model("odd_addresses", odd_addresses, vectors, F.mse_loss),
    Model("randomness", randomness, vectors, F.mse_loss, quiet_in_eval=False),
    Model("without_weights", without_weights, vectors, F.mse_loss),
    Model(
        "attention_residuals",
        attention_residuals,
        vectors,
        F.mse_loss,
        attention_residuals_forward,
    ),
    Model("deepstack", deepstack, images_and_words, token_loss, deepstack_forward),
    Model("tokens_ahead", tokens_ahead, tokens, loss_of_all_heads, tokens_ahead_forward),
    Model("experts", experts, tokens, loss_with_routers, experts_forward),
)
"""Every model the laws of exactness are tested on."""
LOW_PRECISION = Model("bfloat16", bfloat16, vectors, F.mse_loss, gradient_dtype=torch.float32)
"""Weights in bfloat16, whose gradients add up in float32."""
BY_NAME = {model.name: model for model in ALL_MODELS}


def drawn(n: int, seed: int = 1) -> Batch:
    return vectors(n, torch.Generator().manual_seed(seed))
