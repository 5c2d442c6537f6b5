"""The stem before the cells, and the heads after them."""

from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ConfigError

from .operations import Conv2d, Norm, SameConv2d

STEM_CHANNELS = 32
AUXILIARY_CHANNELS = (51, 307)
"""Channels of its two convolutions: int(128 s) and int(768 s) with the TPU code's s = 0.4."""
POOL_WINDOW = 5
"""Pixels a side of the auxiliary head's pooling window."""
POOL_STRIDE = 3
"""Stride of that pooling, in pixels."""


class Stem(nn.Module):
    """A 3x3 convolution of the image and BatchNorm, without ReLU.

    For ImageNet, with stride 2 and no padding: (B, in, H, W) -> (B, 32, (H - 1) // 2,
    (W - 1) // 2).  For small images, with stride 1: (B, in, H, W) -> (B, small_channels, H, W).
    """

    def __init__(self, in_channels: int, small_channels: int | None, norm: Norm) -> None:
        super().__init__()
        self.conv: Conv2d
        if small_channels is None:
            self.conv = Conv2d(in_channels, STEM_CHANNELS, (3, 3), (2, 2))
        else:
            self.conv = SameConv2d(in_channels, small_channels, (3, 3))
        self.norm = norm(self.conv.out_channels)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Compute the features of the image."""
        result: Tensor = self.norm(self.conv(image_BCHW))
        return result


class Head(nn.Module):
    """ReLU, mean over all pixels, dropout and a linear layer: (B, C, H, W) -> (B, classes)."""

    def __init__(self, channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Compute the logits."""
        features_BC = F.relu(x_BCHW).mean((2, 3))
        logits: Tensor = self.linear(self.dropout(features_BC))
        return logits


class AuxiliaryHead(nn.Module):
    """A small classifier in the middle of the network: (B, C, H, W) -> (B, classes).

    ReLU; mean pooling of 5x5 pixels with stride 3; a 1x1 convolution to 51 channels; a
    convolution to 307 channels over the whole map; a linear layer.  BatchNorm and ReLU follow each
    convolution.

    The window of the last convolution, and so the number of parameters, depends on `side`, the
    expected pixels a side.  A map of another size, or below 5 pixels a side, is pooled adaptively
    to the size of that window.  The public code does not do so; it lets the weights of one image
    size serve another.
    """

    def __init__(self, channels: int, side: int, num_classes: int, norm: Norm) -> None:
        super().__init__()
        self.side = side
        self.window = max(0, side - POOL_WINDOW) // POOL_STRIDE + 1
        narrow, wide = AUXILIARY_CHANNELS
        self.narrow_conv = Conv2d(channels, narrow, (1, 1))
        self.narrow_norm = norm(narrow)
        self.wide_conv = Conv2d(narrow, wide, (self.window, self.window))
        self.wide_norm = norm(wide)
        self.linear = nn.Linear(wide, num_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Compute the auxiliary logits.

        Raises:
            ConfigError: in training there is one sample only, without a variance for BatchNorm.
        """
        if self.training and len(x_BCHW) == 1:
            raise ConfigError(
                "the auxiliary head of AmoebaNet was given a micro-batch of one sample: there its "
                "BatchNorm has one value per channel, and nothing to take a variance of. Make "
                "micro-batches of two samples or more, or build the model with auxiliary=False"
            )
        x_BCHW = F.relu(self.narrow_norm(self.narrow_conv(self._pooled(F.relu(x_BCHW)))))
        x_BCHW = F.relu(self.wide_norm(self.wide_conv(x_BCHW)))
        logits: Tensor = self.linear(x_BCHW.flatten(1))
        return logits

    def _pooled(self, x_BCHW: Tensor) -> Tensor:
        if x_BCHW.shape[2:] == (self.side, self.side) and self.side >= POOL_WINDOW:
            return F.avg_pool2d(x_BCHW, POOL_WINDOW, POOL_STRIDE)
        return F.adaptive_avg_pool2d(x_BCHW, self.window)
