"""Vision networks and vocabularies that the fuzz divides."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.alpa_paper.wide_resnet import Bottleneck
from penstock_recipes.zoo.amoebanet.cell import Cell
from penstock_recipes.zoo.amoebanet.genotype import AMOEBANET_B, AMOEBANET_D, Genotype
from tests.sharding.fuzz import Case
from tests.u_net import Down, Up


class InPlace(nn.Module):
    """A residual block as torchvision has it: what is new is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.activation = nn.ReLU(inplace=True)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pairs = nn.Conv2d(8, 8, 1, groups=4)
        self.shortcut = nn.Conv2d(4, 8, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.first(x)))
        y = self.pairs(F.leaky_relu(self.depthwise(y)))
        y += self.shortcut(x)
        self.activation(y)
        return F.hardtanh(y, -1.0, 2.0)


class Norms(nn.Module):
    """All norms of images, without statistics of other batches, and with."""

    def __init__(self) -> None:
        super().__init__()
        self.group = nn.GroupNorm(4, 8)
        self.instance = nn.InstanceNorm2d(8, affine=True)
        self.old = nn.BatchNorm2d(8)
        self.bare = nn.BatchNorm2d(8, affine=False, track_running_stats=False)
        self.flat = nn.BatchNorm1d(
            8, momentum=0.3, eps=0.5
        )  # of two samples all numbers are 1 or -1 else
        nn.init.normal_(self.group.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.old.eval()
        x = F.normalize(self.instance(x) + self.group(x) + self.old(x), dim=1)
        x = self.bare(x)
        return self.flat(x.mean((2, 3))) + self.flat(x.flatten(2)).sum(-1)


class Pools(nn.Module):
    """Pools, joined and divided images, and what is left of dimensions that are summed over."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.pad(x, (1, 0, 0, 1), value=0.5).chunk(2, 1)
        most = F.max_pool2d(one, 2, ceil_mode=True)
        mean = F.avg_pool2d(F.pad(other, (0, 1)), 2, ceil_mode=True)[..., : most.shape[-1]]
        few = F.adaptive_avg_pool2d(torch.cat([most, mean], 1), (2, 2))
        large = F.interpolate(few, scale_factor=2, mode="bilinear") * few.amax(
            (2, 3), keepdim=True
        )
        first, second = torch.stack([large, large.square()]).unbind(0)
        parts = first.split((2, 2), dim=2)
        centred = second - second.mean((0, 2), keepdim=True) + parts[0].sum(1, keepdim=True).mean()
        return centred.flatten(1) * F.adaptive_max_pool2d(first, 1).flatten(1).sum(1, keepdim=True)


class Lines(nn.Module):
    """Convolutions of one and three dimensions, and turned ones."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(4, 6, 3, stride=2)
        self.own = nn.ConvTranspose1d(6, 6, 2, groups=6)
        self.line, self.block = nn.Conv1d(6, 4, 3), nn.Conv3d(4, 5, (1, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(self.own(self.up(x))).relu()
        return self.block(y.unsqueeze(2).unsqueeze(3) + y[:, :, None, :, None].tanh())


class UNetPart(nn.Module):
    """One level of a U-Net, down and up again."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.down, self.up = Down(4, 8, norm, dropout=0.2), Up(8, norm)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.up(self.down(x), x)
        return result


class AmoebaCell(nn.Module):
    """A cell that reads one image as both."""

    def __init__(self, genotype: Genotype) -> None:
        super().__init__()
        norm = partial(nn.BatchNorm2d, momentum=0.2)
        cell = genotype.reduction
        self.cell = Cell(cell, 16, 2, 4, None, norm=norm, drop_path=0.0)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.cell(x, x)
        return result


class LanguageHead(nn.Module):
    """Words to the loss of the next ones, with one table for both."""

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=-3)
        self.head = nn.Linear(6, 11)
        self.smoothing = smoothing

    def forward(self, words: Tensor) -> Tensor:
        x_BTV = self.head(self.table(words[:, :-1]).tanh())
        targets = words[:, 1:]
        mean = F.cross_entropy(
            x_BTV.flatten(0, 1), targets.flatten(), ignore_index=4, label_smoothing=self.smoothing
        )
        logs = x_BTV.transpose(1, 2).log_softmax(1)
        each = F.nll_loss(logs, targets, reduction="none")
        return (
            mean * 3
            + each.sum()
            + F.nll_loss(logs, targets)
            + F.cross_entropy(x_BTV.transpose(1, 2), targets, reduction="sum")
        )


class Weighed(nn.Module):
    """A classifier's loss, with classes that weigh more, and of shares of classes."""

    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 8)
        self.register_buffer("weight", torch.linspace(0.5, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(x)
        targets = torch.arange(x.shape[0]) % 8
        hard = F.cross_entropy(logits, targets, self.weight, label_smoothing=0.1)
        return hard + F.cross_entropy(logits, logits.detach().softmax(-1))


_WORDS = ((5, 4), (2, 7))

CASES = [
    Case("in place", InPlace, (4, 4, 7, 6), ((3, 4, 5, 5), (2, 4, 4, 3))),
    Case("bottleneck", partial(Bottleneck, 4, 4, stride=2), (4, 4, 6, 6), ((3, 4, 5, 5),)),
    Case("norms", Norms, (4, 8, 4, 3), ((3, 8, 2, 3), (2, 8, 3, 3))),
    Case("pools", Pools, (4, 8, 5, 7), ((3, 8, 7, 6), (1, 8, 5, 5))),
    Case("lines", Lines, (4, 4, 6), ((3, 4, 5), (1, 4, 6))),
    Case("u-net, batch", partial(UNetPart, "batch"), (4, 4, 6, 7), ((3, 4, 5, 4),)),
    Case("u-net, group", partial(UNetPart, "group"), (4, 4, 6, 7), ((1, 4, 5, 4),)),
    Case("amoebanet-b", partial(AmoebaCell, AMOEBANET_B), (4, 4, 8, 7), ((3, 4, 6, 6),)),
    Case("amoebanet-d", partial(AmoebaCell, AMOEBANET_D), (4, 4, 8, 7), ((3, 4, 6, 6),)),
    Case("language head", LanguageHead, (4, 5), _WORDS, num_words=11),
    Case("smooth head", partial(LanguageHead, smoothing=0.2), (4, 5), _WORDS, num_words=11),
    Case("weighed", Weighed, (4, 6), ((3, 6), (5, 6))),
]
