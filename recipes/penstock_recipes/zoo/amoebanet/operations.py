"""The operations of AmoebaNet's cells, by name (TPU code, network_utils.py).

Each has input channels, output channels and a stride of 1 or 2.  A convolution comes with ReLU
before and BatchNorm after it.  All use TensorFlow's SAME padding: a side of n pixels becomes
ceil(n / stride), with the odd pixel of padding at the end.
"""

from collections.abc import Callable
from functools import partial
from math import ceil, prod, sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Callable[[int], nn.BatchNorm2d]
"""Number of channels -> BatchNorm."""
Size = tuple[int, int]
"""Rows and columns."""
BOTTLENECK = 4
"""Channels of an operation over those of its bottleneck."""


def same_padding(size: int, window: int, stride: int) -> tuple[int, int]:
    """Return the padding before and after a side of `size` pixels."""
    total = max((ceil(size / stride) - 1) * stride + window - size, 0)
    return total // 2, total - total // 2


def _padding(x_BCHW: Tensor, window: Size, stride: Size) -> tuple[Size, Size]:
    """Return the padding before both sides, and the extra padding after them."""
    pairs = [same_padding(*side) for side in zip(x_BCHW.shape[2:], window, stride, strict=True)]
    (top, bottom), (left, right) = pairs
    return (top, left), (bottom - top, right - left)


class Conv2d(nn.Conv2d):
    """A convolution without padding and without bias, as a BatchNorm follows.

    Weights are normal with variance 2 / fan-out, as in the TPU code.  The fan-out of a depthwise
    convolution is the size of its window.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        window: Size,
        stride: Size = (1, 1),
        groups: int = 1,
    ) -> None:
        super().__init__(in_channels, out_channels, window, stride, groups=groups, bias=False)

    def reset_parameters(self) -> None:
        """Initialise the weights."""
        fan_out = self.out_channels // self.groups * prod(self.kernel_size)
        nn.init.normal_(self.weight, std=sqrt(2 / fan_out))


class SameConv2d(Conv2d):
    """A convolution with SAME padding by zeros."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Convolve: (B, in, H, W) -> (B, out, ceil(H / stride), ceil(W / stride))."""
        rows, columns = self.kernel_size
        row_stride, column_stride = self.stride
        before, more = _padding(x_BCHW, (rows, columns), (row_stride, column_stride))
        if any(more):
            x_BCHW = F.pad(x_BCHW, (0, more[1], 0, more[0]))
        return F.conv2d(x_BCHW, self.weight, None, self.stride, before, groups=self.groups)


class SamePool(nn.Module):
    """Pooling with SAME padding, which counts neither in a maximum nor in a mean.

    `ceil_mode` cuts the windows at the end of the map, which replaces padding without a copy.  If
    only the end needs padding, the stride must be 2.
    """

    def __init__(self, window: int, stride: int, *, maximum: bool) -> None:
        super().__init__()
        self.window, self.stride, self.maximum = (window, window), (stride, stride), maximum

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Pool: (B, C, H, W) -> (B, C, ceil(H / stride), ceil(W / stride))."""
        before, _ = _padding(x_BCHW, self.window, self.stride)
        if self.maximum:
            return F.max_pool2d(x_BCHW, self.window, self.stride, before, ceil_mode=True)
        return F.avg_pool2d(
            x_BCHW, self.window, self.stride, before, ceil_mode=True, count_include_pad=False
        )

    def extra_repr(self) -> str:
        """Show the kind, the window and the stride."""
        kind = "maximum" if self.maximum else "mean"
        return f"{kind}, window={self.window}, stride={self.stride}"


def convolution(
    in_channels: int, out_channels: int, norm: Norm, window: Size = (1, 1), stride: Size = (1, 1)
) -> tuple[nn.Module, ...]:
    """Return ReLU, convolution and BatchNorm."""
    conv = SameConv2d(in_channels, out_channels, window, stride)
    return nn.ReLU(), conv, norm(out_channels)


def _conv_1x1(in_channels: int, out_channels: int, stride: int, norm: Norm) -> nn.Module:
    return nn.Sequential(*convolution(in_channels, out_channels, norm, stride=(stride, stride)))


def _none(in_channels: int, out_channels: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return _conv_1x1(in_channels, out_channels, stride, norm)


def _conv_3x3(in_channels: int, out_channels: int, stride: int, norm: Norm) -> nn.Module:
    narrow = out_channels // BOTTLENECK
    return nn.Sequential(
        *convolution(in_channels, narrow, norm),
        *convolution(narrow, narrow, norm, (3, 3), (stride, stride)),
        *convolution(narrow, out_channels, norm),
    )


def _conv_1x7_7x1(in_channels: int, out_channels: int, stride: int, norm: Norm) -> nn.Module:
    narrow = out_channels // BOTTLENECK
    return nn.Sequential(
        *convolution(in_channels, narrow, norm),
        *convolution(narrow, narrow, norm, (1, 7), (1, stride)),
        *convolution(narrow, narrow, norm, (7, 1), (stride, 1)),
        *convolution(narrow, out_channels, norm),
    )


def _separable_twice(
    in_channels: int, out_channels: int, stride: int, norm: Norm, *, window: int
) -> nn.Module:
    def once(channels: int, step: int) -> tuple[nn.Module, ...]:
        depthwise = SameConv2d(channels, channels, (window, window), (step, step), groups=channels)
        pointwise = SameConv2d(channels, out_channels, (1, 1))
        return nn.ReLU(), depthwise, pointwise, norm(out_channels)

    return nn.Sequential(*once(in_channels, stride), *once(out_channels, 1))


def _pool(
    in_channels: int,
    out_channels: int,
    stride: int,
    norm: Norm,
    *,
    window: int,
    maximum: bool,
) -> nn.Module:
    pooling = SamePool(window, stride, maximum=maximum)
    if in_channels == out_channels:
        return pooling
    projection = SameConv2d(in_channels, out_channels, (1, 1))
    return nn.Sequential(pooling, projection, norm(out_channels))


OPERATIONS: dict[str, Callable[[int, int, int, Norm], nn.Module]] = {
    "none": _none,
    "conv_1x1": _conv_1x1,
    "conv_3x3": _conv_3x3,
    "conv_1x7_7x1": _conv_1x7_7x1,
    "separable_3x3_twice": partial(_separable_twice, window=3),
    "separable_5x5_twice": partial(_separable_twice, window=5),
    "max_pool_2x2": partial(_pool, window=2, maximum=True),
    "max_pool_3x3": partial(_pool, window=3, maximum=True),
    "avg_pool_3x3": partial(_pool, window=3, maximum=False),
}
"""Name -> function from input channels, output channels, stride and BatchNorm to the operation.

none          the input; a 1x1 convolution if the channels or the stride change
conv_3x3      a 3x3 convolution at a quarter of the channels, between two 1x1 convolutions
conv_1x7_7x1  the same with a 1x7 and then a 7x1 convolution
separable_*   twice a depthwise and a 1x1 convolution, the first with the stride
*_pool_*      pooling; then a 1x1 convolution and BatchNorm, without ReLU, if the channels change
"""


class FactorizedReduction(nn.Module):
    """Halve the resolution by two 1x1 convolutions of every second pixel, one pixel apart.

    (B, in, H, W) -> (B, out, ceil(H / 2), ceil(W / 2)), after a ReLU; each convolution gives half
    of the channels.
    """

    def __init__(self, in_channels: int, out_channels: int, norm: Norm) -> None:
        super().__init__()
        self.here = SameConv2d(in_channels, out_channels // 2, (1, 1), (2, 2))
        self.beside = SameConv2d(in_channels, out_channels - out_channels // 2, (1, 1), (2, 2))
        self.norm = norm(out_channels)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Concatenate and normalise both convolutions; pixels past the edge are zero."""
        x_BCHW = F.relu(x_BCHW)
        moved_BCHW = F.pad(x_BCHW, (0, 1, 0, 1))[:, :, 1:, 1:]
        both_BCHW = torch.cat([self.here(x_BCHW), self.beside(moved_BCHW)], dim=1)
        result: Tensor = self.norm(both_BCHW)
        return result
