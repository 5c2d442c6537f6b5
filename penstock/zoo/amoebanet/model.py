"""AmoebaNet: stem, a row of cells each of which reads two others, head and auxiliary head."""

from functools import partial

from torch import Tensor, nn

from .cell import Cell, Previous
from .design import Design
from .genotype import Genotype
from .heads import AuxiliaryHead, Head, Stem
from .operations import Norm


class AmoebaNet(nn.Module):
    """The network of a genotype; `amoebanet_b` and `amoebanet_d` make it.

        image -> stem -> cell 0 -> cell 1 -> ... -> cell n -> ... -> last cell -> head
                    \\________________/  each cell also reads      \\-> auxiliary head
                                        the one before the last

    (B, in_channels, H, W) -> (B, classes) in evaluation; in training two of these, the second
    one from the auxiliary head, if the model has one.

    The last layers, which depend on the number of classes, are `head.linear` and
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
        made = [cell for cell in self.cells if isinstance(cell, Cell)]
        self.auxiliary_cell = design.auxiliary_cell
        self.auxiliary_head: AuxiliaryHead | None = None
        if design.auxiliary:
            self.auxiliary_head = AuxiliaryHead(
                made[design.auxiliary_cell].channels,
                design.auxiliary_side,
                design.num_classes,
                norm,
            )
        self.head = Head(made[-1].channels, design.num_classes, design.dropout)

    def forward(self, image_BCHW: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the logits; in training also those of the auxiliary head."""
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
