"""U-Net: an encoder, a decoder, and long skips from each level of one to the other's.

Ronneberger, Fischer and Brox 2015 (arXiv:1505.04597), figure 1.

Letters: B samples, C channels, H height, W width.
"""

from math import gcd, sqrt

import torch
from torch import Tensor, nn

MOST_GROUPS = 32
"""Groups that Wu and He 2018 (arXiv:1803.08494) advise; fewer where channels cannot be so cut."""


class UNet(nn.Module):
    """(B, in_channels, H, W) -> (B, out_channels, H, W).

    `encoder[0]` reads the image; each later entry halves the resolution.  `bottom` halves it once
    more, and each entry of `decoder` doubles it and reads what the encoder gave at that size.
    """

    def __init__(
        self,
        encoder: list[nn.Module],
        bottom: nn.Module,
        decoder: list[nn.Module],
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(encoder)
        self.bottom = bottom
        self.decoder = nn.ModuleList(decoder)
        self.head = head

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Compute one number per output channel for each pixel."""
        skips = []
        for block in self.encoder:
            x_BCHW = block(x_BCHW)
            skips.append(x_BCHW)
        x_BCHW = self.bottom(x_BCHW)
        for block, skip_BCHW in zip(self.decoder, reversed(skips), strict=True):
            x_BCHW = block(x_BCHW, skip_BCHW)
        result: Tensor = self.head(x_BCHW)
        return result


class TwoConvolutions(nn.Module):
    """Two 3x3 convolutions, each with its norm and ReLU.

    (B, in_channels, H, W) -> (B, out_channels, H, W).
    """

    def __init__(self, in_channels: int, out_channels: int, norm: str) -> None:
        super().__init__()
        self.first = _convolution(in_channels, out_channels)
        self.first_norm = _norm(norm, out_channels)
        self.second = _convolution(out_channels, out_channels)
        self.second_norm = _norm(norm, out_channels)
        self.activation = nn.ReLU()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Convolve twice."""
        x_BCHW = self.activation(self.first_norm(self.first(x_BCHW)))
        result: Tensor = self.activation(self.second_norm(self.second(x_BCHW)))
        return result


class Down(nn.Module):
    """Halve the resolution, convolve twice, drop.

    (B, in_channels, H, W) -> (B, out_channels, H / 2, W / 2), rounded up.
    """

    def __init__(
        self, in_channels: int, out_channels: int, norm: str, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.convolutions = TwoConvolutions(in_channels, out_channels, norm)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Compute what is seen at half the resolution."""
        result: Tensor = self.dropout(self.convolutions(self.pool(x_BCHW)))
        return result


class Up(nn.Module):
    """Double the resolution, set the skip beside it, convolve twice.

    (B, in_channels, H, W) and (B, in_channels / 2, up to 2H, up to 2W) -> the skip's shape.
    """

    def __init__(self, in_channels: int, norm: str) -> None:
        super().__init__()
        channels = in_channels // 2
        self.widen = nn.ConvTranspose2d(in_channels, channels, 2, stride=2)
        _draw(self.widen, fan_in=in_channels)  # stride 2: each output reads one pixel only
        self.convolutions = TwoConvolutions(in_channels, channels, norm)

    def forward(self, x_BCHW: Tensor, skip_BCHW: Tensor) -> Tensor:
        """Compute what both know of each pixel of the skip."""
        height, width = skip_BCHW.shape[-2:]
        wide_BCHW = self.widen(x_BCHW)[..., :height, :width]
        result: Tensor = self.convolutions(torch.cat([skip_BCHW, wide_BCHW], 1))
        return result


def unet(
    *,
    in_channels: int = 3,
    out_channels: int = 2,
    depth: int = 4,
    width: int = 64,
    norm: str = "batch",
    dropout: float = 0.0,
) -> UNet:
    """Build one for any H and W: an odd last row or column is pooled as it is, and cut back.

    `norm` is "batch", or "group" whose gradients do not depend on other samples; `dropout` is at
    the bottom, where there are the most channels.
    """
    widths = [width * 2**level for level in range(depth + 1)]
    encoder: list[nn.Module] = [TwoConvolutions(in_channels, width, norm)]
    for level in range(1, depth):
        encoder.append(Down(widths[level - 1], widths[level], norm))
    bottom = Down(widths[depth - 1], widths[depth], norm, dropout)
    decoder: list[nn.Module] = [Up(channels, norm) for channels in reversed(widths[1:])]
    head = nn.Conv2d(width, out_channels, 1)
    _draw(head, fan_in=width)
    return UNet(encoder, bottom, decoder, head)


def _convolution(in_channels: int, out_channels: int) -> nn.Conv2d:
    made = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    _draw(made, fan_in=9 * in_channels)
    return made


def _norm(norm: str, channels: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(gcd(MOST_GROUPS, channels), channels)


def _draw(module: nn.Conv2d | nn.ConvTranspose2d, fan_in: int) -> None:
    nn.init.normal_(module.weight, std=sqrt(2 / fan_in))
    if module.bias is not None:
        nn.init.zeros_(module.bias)
