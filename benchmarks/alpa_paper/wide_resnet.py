"""Residual networks of bottleneck blocks: the wide ones of Alpa.

He et al. 2016 (arXiv:1512.03385), table 1; Zagoruyko and Komodakis 2016 (arXiv:1605.07146) for
width; Zheng et al. 2022 (arXiv:2201.12023), table 8, for the wide configurations.

Letters: B samples, C channels, H height, W width.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock_recipes.zoo.transformer_sizes import require_at_least, require_one_of

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Number of layers -> blocks of each group: 3 convolutions a block, the stem's and the head."""
EXPANSION = 4
"""A block gives so many times the channels of its first convolution."""


@dataclass(frozen=True, slots=True)
class WideResNetSize:
    """A wide residual network: `width_factor` times the channels in each 3x3 convolution."""

    num_layers: int
    base_channels: int
    width_factor: int


WIDE_RESNET_SIZES = {
    "250M": WideResNetSize(50, 160, 2),
    "500M": WideResNetSize(50, 224, 2),
    "1B": WideResNetSize(50, 320, 2),
    "2B": WideResNetSize(50, 448, 2),
    "4B": WideResNetSize(50, 640, 2),
    "6.8B": WideResNetSize(50, 320, 16),
    "13B": WideResNetSize(101, 320, 16),
}
"""The configurations that Alpa was measured with, by their names in its paper."""


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with BatchNorm, added to the input (He et al., figure 5).

    (B, in_channels, H, W) -> (B, 4 channels, H / stride, W / stride).  The stride is the 3x3
    convolution's, as in torchvision and Alpa; the paper puts it into the first 1x1 convolution,
    which then skips three quarters of its input.  Where channels or stride change, the input
    passes a 1x1 convolution with BatchNorm before it is added.
    """

    def __init__(
        self, in_channels: int, channels: int, width_factor: int = 1, stride: int = 1
    ) -> None:
        super().__init__()
        inner, out_channels = channels * width_factor, channels * EXPANSION
        self.body = nn.Sequential(
            convolution(in_channels, channels, 1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            convolution(channels, inner, 3, stride),
            nn.BatchNorm2d(inner),
            nn.ReLU(),
            convolution(inner, out_channels, 1),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                convolution(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels)
            )
        self.activation = nn.ReLU()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Compute activation(body(x) + shortcut(x))."""
        result: Tensor = self.activation(self.body(x_BCHW) + self.shortcut(x_BCHW))
        return result


def bottleneck_resnet(
    blocks: Sequence[int] = BLOCKS[50],
    base_channels: int = 64,
    width_factor: int = 1,
    *,
    in_channels: int = 3,
    num_classes: int = 1000,
    zero_last_norm: bool = False,
) -> nn.Sequential:
    """Build a stem, groups of bottleneck blocks, global average pooling and a linear head.

    (B, in_channels, H, W) -> (B, num_classes), for any H and W; in training BatchNorm wants more
    than one value per channel, so one image must be larger than 32 pixels.  `blocks` counts the
    blocks of each group.  A group has twice the channels of the one before it, at half the
    resolution.  Convolutions are drawn as He et al. 2015 advise, by fan-out, as torchvision does.

    The state's entries stand in torchvision's order, so its weights can be loaded by position:

        model.load_state_dict(dict(zip(model.state_dict(), weights.values(), strict=True)))

    Args:
        blocks: how many blocks each group has.
        base_channels: channels of the stem, and of the first group's first convolutions.
        width_factor: the 3x3 convolutions have so many times the channels of those before them.
        in_channels: channels of an image.
        num_classes: numbers that the head gives.
        zero_last_norm: let each block start as its shortcut alone: the scale of its last
            BatchNorm is 0 (Goyal et al. 2017, section 5.1).

    Raises:
        ConfigError: a size is below 1, or there are no groups.
    """
    if not blocks:
        raise ConfigError("blocks=(): give the number of blocks of each group, such as (3, 4)")
    require_at_least(1, **{f"blocks[{group}]": count for group, count in enumerate(blocks)})
    require_at_least(
        1,
        base_channels=base_channels,
        width_factor=width_factor,
        in_channels=in_channels,
        num_classes=num_classes,
    )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = convolution(in_channels, base_channels, 7, stride=2)
    layers["stem_norm"] = nn.BatchNorm2d(base_channels)
    layers["stem_relu"] = nn.ReLU()
    layers["stem_pool"] = nn.MaxPool2d(3, stride=2, padding=1)
    for number, block in enumerate(_blocks(blocks, base_channels, width_factor)):
        if zero_last_norm:
            nn.init.zeros_(block.body[-1].weight)  # type: ignore[arg-type]
        layers[f"block{number}"] = block
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["head"] = nn.Linear(base_channels * 2 ** (len(blocks) - 1) * EXPANSION, num_classes)
    return nn.Sequential(layers)


def wide_resnet(
    size: str | WideResNetSize = "250M", *, num_classes: int = 1024, in_channels: int = 3
) -> nn.Sequential:
    """Build one of Alpa's wide residual networks, by its name in the paper or by its sizes.

    "250M", "500M", "1B", "2B", "4B", "6.8B" and "13B" have 254M, 495M, 1.006B, 1.965B, 4.001B,
    6.728B and 12.633B parameters for the paper's 1024 classes.

    The paper gives layers, base channels and width factor, but not what the factor widens.  Alpa's
    code widens the 3x3 convolution alone, after a 1x1 convolution to the plain width; only so do
    the names fit, to 3 %.  torchvision's wide_resnet50_2 widens the output of the first
    convolution too: 423M parameters for "250M", and 144 billion for "13B".

    As in Alpa, each block starts as its shortcut alone (see `zero_last_norm` of
    `bottleneck_resnet`).  Alpa's max pooling pads below and to the right only; here it pads on
    all sides, as in torchvision.

    Raises:
        ConfigError: the name is not known; a size is below 1; there is no network of so many
            layers.
    """
    if isinstance(size, str):
        require_one_of(tuple(WIDE_RESNET_SIZES), size=size)
        size = WIDE_RESNET_SIZES[size]
    require_one_of(tuple(BLOCKS), num_layers=size.num_layers)
    return bottleneck_resnet(
        BLOCKS[size.num_layers],
        size.base_channels,
        size.width_factor,
        in_channels=in_channels,
        num_classes=num_classes,
        zero_last_norm=True,
    )


def convolution(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    """Make a convolution that keeps height and width, over its stride, drawn by fan-out."""
    made = nn.Conv2d(in_channels, out_channels, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made


def _blocks(blocks: Sequence[int], base_channels: int, width_factor: int) -> Iterator[Bottleneck]:
    in_channels = base_channels
    for group, count in enumerate(blocks):
        channels = base_channels * 2**group
        for place in range(count):
            stride = 2 if group and not place else 1
            yield Bottleneck(in_channels, channels, width_factor, stride)
            in_channels = channels * EXPANSION
