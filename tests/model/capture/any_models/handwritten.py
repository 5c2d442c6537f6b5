"""Models written by hand: what no library has, or has with much around it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad

from .chain import WIDTH, inputs
from .made import LENGTH, NUM_WORDS, AnyModel, Made


class Residual(nn.Module):
    """Two convolutions with BatchNorm, activations in place, and a way around them."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm, self.relu = nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(after)
        self.around: nn.Module | None = None
        if before != after:
            shorter = nn.Conv2d(before, after, 1, stride, bias=False)
            self.around = nn.Sequential(shorter, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.last_norm(self.second(self.relu(self.norm(self.first(x)))))
        y += x if self.around is None else self.around(x)
        return self.relu(y)


class ResNet(nn.Module):  # residual blocks in two groups
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.group1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.group2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.group2(self.group1(self.relu(self.norm(self.stem(x)))))
        return self.head(torch.flatten(self.pool(x), 1))


class Convolved(nn.Sequential):  # convolution, BatchNorm, activation in place
    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, 1, 1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        )


class UNet(nn.Module):  # long skips, from the first layers to the last ones; a branch on shapes
    def __init__(self) -> None:
        super().__init__()
        self.stem = Convolved(3, 8)
        self.downs = nn.ModuleList([Convolved(8, 16), Convolved(16, 32)])
        wider = [nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)]
        self.wideners = nn.ModuleList(wider)
        self.ups = nn.ModuleList([Convolved(32, 16), Convolved(16, 8)])
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.stem(x)]
        for down in self.downs:
            skips.append(down(max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for widen, up in zip(self.wideners, self.ups, strict=True):
            x, skip = widen(x), skips.pop()
            if x.shape[-1] != skip.shape[-1]:
                x = pad(x, (0, 1, 0, 1))
            x = up(torch.cat([skip, x], 1))
        return self.head(x)


class Branching(nn.Module):
    """Goes one way or another by what it computed; adds the first value again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.head = nn.Linear(16, NUM_WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.embed(x) * self.scale
        for n, layer in enumerate(self.layers):
            h = h + layer(h) if h.mean() > 0 else layer(h) * 0.5 + h
            if n % 2 and h.sum().item() < 1e9:
                h = h + first * 0.1
        return self.head(h * self.scale)


class Attention(nn.Module):  # looks back; with dropout
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.all_three = heads, nn.Linear(width, 3 * width)
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(2, (self.heads, -1)) for part in self.all_three(x).chunk(3, 2))
        query, key, value = (part.transpose(1, 2) for part in parts)
        found = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=0.1 if self.training else 0.0
        )
        return self.dropout(self.out(found.transpose(1, 2).flatten(2)))


class TransformerBlock(nn.Module):  # attention and two linear layers, each with a way around
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads)
        linear = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(linear[0], nn.GELU(), linear[1], nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class NanoGPT(nn.Module):
    """As in nanoGPT: a ModuleDict, the head tied to the embedding, dropout between."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(4))
        parts = {"words": nn.Embedding(NUM_WORDS, width), "places": nn.Embedding(LENGTH, width)}
        self.transformer = nn.ModuleDict({**parts, "blocks": blocks, "norm": nn.LayerNorm(width)})
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(width, NUM_WORDS, bias=False)
        self.transformer["words"].weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        x = self.transformer["words"](x) + self.transformer["places"](places)
        x = self.dropout(x)
        for block in self.transformer["blocks"].children():
            x = block(x)
        return self.head(self.transformer["norm"](x))


class DenseNet(nn.Module):  # every layer reads what all before it gave
    def __init__(self, growth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(8 + n * growth),
                nn.ReLU(inplace=True),
                nn.Conv2d(8 + n * growth, growth, 3, 1, 1, bias=False),
            )
            for n in range(5)
        )
        self.head = nn.Linear(8 + 5 * growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.head(torch.cat(found, 1).mean((2, 3)))


class Recurrent(nn.Module):
    """Layers of LSTM, each started with the states in which the one before it ended."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(4))
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(width, NUM_WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x, states = self.embed(x), None
        for layer in self.layers:
            y, states = layer(x, states)
            x = x + self.dropout(y)
        return self.head(x)


class InPlaceGlue(nn.Module):  # changes what goes from block to block in place, also through views
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        self.head = nn.Linear(width, NUM_WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for number, block in enumerate(self.blocks):
            y = block(h)
            y[:, number] *= 0.5
            y.select(2, number).zero_()
            h = h.add(y).div_(1.5).relu()
        return self.head(h)


class TorchTransformer(nn.Module):  # torch's own nn.Transformer, with masks
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, width)
        sizes: dict[str, Any] = {"num_encoder_layers": 3, "num_decoder_layers": 3}
        self.inner = nn.Transformer(width, 2, dim_feedforward=24, batch_first=True, **sizes)
        self.head = nn.Linear(width, NUM_WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        found = self.inner(self.embed(source), self.embed(target), tgt_mask=mask)
        return self.head(found)


def sequential() -> nn.Sequential:
    pairs = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(
        nn.Embedding(NUM_WORDS, 16), *pairs, nn.LayerNorm(16), nn.Linear(16, NUM_WORDS)
    )


class Experts(nn.Module):
    """Gives each row to one of its experts, and calls those that are given any."""

    def __init__(self, *, by_shape: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.by_shape = by_shape

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if self.by_shape:
                (rows,) = torch.where(chosen == number)
                if len(rows):
                    y = y.index_add(0, rows, expert(x[rows]) * share[rows, None])
            elif (mine := chosen == number).any():
                y[mine] = expert(x[mine]) * share[mine, None]
        return y


class ExpertLayer(nn.Module):
    def __init__(self, *, by_shape: bool) -> None:
        super().__init__()
        self.mix, self.experts = nn.Linear(WIDTH, WIDTH), Experts(by_shape=by_shape)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.mix(x))


def expert_layers(*, by_shape: bool) -> Made:
    layers = [ExpertLayer(by_shape=by_shape) for _ in range(3)]
    return InRow([nn.Linear(WIDTH, WIDTH), *layers]), inputs


class InRow(nn.Module):  # calls the entries of a list one after the other
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ExpertsOnce(nn.Module):  # has experts that are in no layer of a list
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = Experts(by_shape=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.moe(self.first(x)))


EXPERTS = (
    AnyModel("experts called as values say", partial(expert_layers, by_shape=False)),
    AnyModel("the same, as shapes say", partial(expert_layers, by_shape=True)),
    AnyModel("experts in no list of layers", lambda: (ExpertsOnce(), inputs)),
)
