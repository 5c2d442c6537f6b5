"""AmoebaNet: a stem, cells that read the two cells before them, a head and an auxiliary head."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from .cell import Cell, Previous
from .design import Design
from .genotype import AMOEBANET_B, AMOEBANET_D, Genotype
from .heads import AuxiliaryHead, Head, Stem
from .operations import Norm


class AmoebaNet(nn.Module):
    """The network of a genotype; `amoebanet_b` and `amoebanet_d` build it.

        image -> stem -> cell 0 -> cell 1 -> ... -> cell n -> ... -> last cell -> head
                    \\________________/  each cell also reads      \\-> auxiliary head
                                        the one before the last

    (B, in_channels, H, W) -> (B, classes); in training also (B, classes) from the auxiliary head,
    if there is one.  The layers that depend on the number of classes are `head.linear` and
    `auxiliary_head.linear`.
    """

    def __init__(self, genotype: Genotype, design: Design) -> None:
        super().__init__()
        norm: Norm = partial(
            nn.BatchNorm2d, momentum=design.norm_momentum, eps=design.norm_epsilon
        )
        small_channels = design.num_filters if design.small else None
        self.stem = Stem(design.in_channels, small_channels, norm)
        channels = self.stem.conv.out_channels
        self.cells = nn.ModuleList(_cells(genotype, design, channels, norm))
        cells = [cell for cell in self.cells if isinstance(cell, Cell)]
        self.auxiliary_cell = design.auxiliary_cell
        self.auxiliary_head: AuxiliaryHead | None = None
        if design.auxiliary:
            self.auxiliary_head = AuxiliaryHead(
                cells[design.auxiliary_cell].channels,
                design.auxiliary_side,
                design.num_classes,
                norm,
            )
        self.head = Head(cells[-1].channels, design.num_classes, design.dropout)

    def forward(self, image_BCHW: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the logits; in training also those of the auxiliary head."""
        # The first cell reads the stem twice.
        current_BCHW = self.stem(image_BCHW)
        previous_BCHW = current_BCHW
        auxiliary = None
        for number, cell in enumerate(self.cells):
            previous_BCHW, current_BCHW = current_BCHW, cell(previous_BCHW, current_BCHW)
            if number == self.auxiliary_cell and self.training and self.auxiliary_head is not None:
                auxiliary = self.auxiliary_head(current_BCHW)
        logits: Tensor = self.head(current_BCHW)
        return logits if auxiliary is None else (logits, auxiliary)


def _cells(genotype: Genotype, design: Design, channels: int, norm: Norm) -> list[Cell]:
    cells: list[Cell] = []
    previous: Previous | None = None
    for place in design.cells:
        cell = Cell(
            genotype.reduction if place.is_reduction else genotype.normal,
            place.width,
            2 if place.is_reduction else 1,
            channels,
            previous,
            norm=norm,
            drop_path=design.drop_path,
        )
        cells.append(cell)
        previous = Previous(channels, is_larger=place.is_reduction)
        channels = cell.channels
    return cells


def amoebanet_d(num_layers: int = 18, num_filters: int = 208, **choices: Any) -> AmoebaNet:
    """Build AmoebaNet-D (L, D), the paper's model for scaling and speed (tables 1 to 3).

    (B, in_channels, H, W) -> (B, num_classes); in training also the auxiliary head's (B,
    num_classes), whose loss Real et al. weigh by 0.4.

        stem: 3x3 convolution, stride 2     32 channels       111 x 111 for 224 x 224
        2 reduction cells                   width D/4, D/2     56, 28
        L/3 normal cells                    D                  28
        reduction cell, L/3 normal cells    2D                 14     auxiliary head
        reduction cell, L/3 normal cells    4D                 7
        ReLU, mean over pixels, dropout, linear layer

    The output of a normal cell has 4 times its width, that of a reduction cell 3 times.

    Args:
        num_layers: L, the normal cells; if no multiple of 3, the later stacks have more.
        num_filters: D, the width of the first stack: a multiple of 4, 16 or more.
        choices: the other fields of `Design`, such as num_classes=1000 and image_size=224.

    The last stack has one pixel for images of 32 pixels, and so has the end of the auxiliary head
    for all images.  BatchNorm then needs micro-batches of two samples or more in training.

    Linear layers are initialised as torch's.  The TPU code uses a variance by fan-out, which gives
    large logits for few classes.

    Raises:
        ConfigError: a size or a share is out of bounds.
    """
    return AmoebaNet(AMOEBANET_D, Design(num_layers, num_filters, **choices))


def amoebanet_b(num_layers: int = 18, num_filters: int = 512, **choices: Any) -> AmoebaNet:
    """Build AmoebaNet-B (L, D), the paper's model for accuracy: (18, 512) at 480 pixels.

    It has 557 M parameters, and 84.4 % top-1 accuracy on ImageNet (section 4).  Its cells have
    separable convolutions instead of the bottlenecks of AmoebaNet-D, and the output of a reduction
    cell has 2 times its width.  The arguments are those of `amoebanet_d`, with a default
    image_size of 480.

    Raises:
        ConfigError: a size or a share is out of bounds.
    """
    choices = {"image_size": 480, **choices}
    return AmoebaNet(AMOEBANET_B, Design(num_layers, num_filters, **choices))
