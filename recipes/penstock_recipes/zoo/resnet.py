"""The small residual network of the digits: He et al. 2016 (arXiv:1512.03385), figure 2."""

from collections import OrderedDict

from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, added to the input (He et al. 2016, figure 2).

    (B, in_width, H, W) -> (B, out_width, H / stride, W / stride).  If width or stride change, the
    skip connection has a 1x1 convolution.
    """

    def __init__(self, in_width: int, out_width: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_width, out_width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(out_width),
            nn.ReLU(),
            nn.Conv2d(out_width, out_width, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_width != out_width:
            self.shortcut = nn.Conv2d(in_width, out_width, 1, stride=stride, bias=False)
        self.activation = nn.ReLU()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Compute activation(body(x) + shortcut(x))."""
        result: Tensor = self.activation(self.body(x_BCHW) + self.shortcut(x_BCHW))
        return result


def residual_network(
    num_blocks: int = 4,
    width: int = 32,
    *,
    in_channels: int = 1,
    num_classes: int = 10,
    dropout: float = 0.2,
) -> nn.Sequential:
    """Build stem, `num_blocks` residual blocks, global average pooling, dropout and a linear head.

    (B, in_channels, H, W) -> (B, num_classes), for any H and W from 2 up.  The first half of the
    blocks has `width` channels; the second half has twice as many, at half the resolution.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
    layers["stem_norm"] = nn.BatchNorm2d(width)
    layers["stem_relu"] = nn.ReLU()
    in_width = width
    for block in range(num_blocks):
        halves = block == (num_blocks + 1) // 2
        out_width = 2 * in_width if halves else in_width
        layers[f"block{block}"] = ResidualBlock(in_width, out_width, stride=2 if halves else 1)
        in_width = out_width
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["dropout"] = nn.Dropout(dropout)
    layers["head"] = nn.Linear(in_width, num_classes)
    return nn.Sequential(layers)
