"""The checked sizes and options of an AmoebaNet, and the sequence of its cells."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from math import ceil

from penstock.errors import ConfigError

NUM_STACKS = 3
"""Stacks of normal cells."""
STEM_SHARES = (4, 2)
"""Channels of the first stack over those of the two reduction cells of the stem."""
LEAST_FILTERS = 16
"""The first cell has a quarter of these channels, and its bottlenecks a quarter of that: one."""
LEAST_SIDE = 32
"""Least pixels a side of an image."""
LEAST_SIDE_SMALL = 4
"""Least pixels a side of an image with `small`."""


@dataclass(frozen=True, slots=True)
class CellPlace:
    """A cell of the sequence: its channels, and whether it halves the resolution."""

    width: int
    is_reduction: bool


@dataclass(frozen=True, slots=True)
class Design:
    """The arguments of `amoebanet_d` and `amoebanet_b`.

    Raises:
        ConfigError: a size or a share is out of bounds.
    """

    num_layers: int
    num_filters: int
    _: KW_ONLY
    num_classes: int = 1000
    """The paper's counts fit 1000; the TPU code has 1001, one for "background"."""
    in_channels: int = 3
    """3 for colour images, 1 for grey ones."""
    image_size: int = 224
    """Pixels a side, 32 or more, which decide the shape of the auxiliary head.  Images of another
    size, or of unequal sides, work too: see `AuxiliaryHead`."""
    dropout: float = 0.5
    """Dropout rate before the last layer (Real et al.: 0.5)."""
    drop_path: float = 0.0
    """Drop-path rate of operations at the end of training (Real et al. keep 0.7, a rate of 0.3);
    see `set_drop_path_progress`."""
    auxiliary: bool = True
    """Add an auxiliary head."""
    small: bool = False
    """Leave out the stem's reductions, as for CIFAR in Real et al.: its convolution has stride 1
    and D channels, and images have 4 pixels a side or more."""
    norm_momentum: float = 0.1
    """Weight of the newest batch in the running statistics of BatchNorm: 1 - 0.9, the decay in the
    TPU code's command line.  Its library's default, a decay of 0.9997, remembers 3,000 steps, too
    many for short runs."""
    norm_epsilon: float = 1e-5
    """Epsilon of BatchNorm, from the TPU code's command line; its library has 1e-3."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_shares()

    def _check_sizes(self) -> None:
        # Depth and width.
        if self.num_layers < NUM_STACKS:
            raise ConfigError(
                f"num_layers={self.num_layers}: normal cells come in {NUM_STACKS} stacks; give "
                f"{NUM_STACKS} or more"
            )
        first_share = STEM_SHARES[0]
        if self.num_filters < LEAST_FILTERS or self.num_filters % first_share:
            raise ConfigError(
                f"num_filters={self.num_filters}: the first cell has a quarter of these channels, "
                "and inside it there are a quarter of that; give a multiple of "
                f"{first_share}, {LEAST_FILTERS} or more"
            )
        # The data: classes, channels, image size.
        for name, count in (("num_classes", self.num_classes), ("in_channels", self.in_channels)):
            if count < 1:
                raise ConfigError(f"{name}={count}: give 1 or more")
        least = LEAST_SIDE_SMALL if self.small else LEAST_SIDE
        if self.image_size < least:
            advice = "make images larger" if self.small else "make them larger, or set small=True"
            raise ConfigError(
                f"image_size={self.image_size}: with small={self.small} images have {least} "
                f"pixels a side or more; {advice}"
            )

    def _check_shares(self) -> None:
        for name, chance in (("dropout", self.dropout), ("drop_path", self.drop_path)):
            if not 0 <= chance < 1:
                raise ConfigError(
                    f"{name}={chance}: it is the chance to drop, from 0 to below 1 (1 minus the "
                    "chance to keep)"
                )
        if not 0 < self.norm_momentum <= 1:
            raise ConfigError(
                f"norm_momentum={self.norm_momentum}: it is the weight of the newest batch in the "
                "running statistics (1 minus TensorFlow's decay), above 0, at most 1"
            )
        if not self.norm_epsilon > 0:
            raise ConfigError(f"norm_epsilon={self.norm_epsilon}: give a number above 0")

    @property
    def cells(self) -> tuple[CellPlace, ...]:
        """All cells: those of the stem, then three stacks, each twice as wide as the last."""
        return tuple(self._cells())

    def _cells(self) -> Iterator[CellPlace]:
        if not self.small:
            for share in STEM_SHARES:
                yield CellPlace(self.num_filters // share, is_reduction=True)
        width = self.num_filters
        reductions = [self.num_layers * n // NUM_STACKS for n in range(1, NUM_STACKS)]
        for number in range(self.num_layers):
            if number in reductions:
                width *= 2
                yield CellPlace(width, is_reduction=True)
            yield CellPlace(width, is_reduction=False)

    @property
    def auxiliary_cell(self) -> int:
        """The number of the last cell of the second stack, which the auxiliary head reads."""
        reductions = [number for number, cell in enumerate(self.cells) if cell.is_reduction]
        return reductions[-1] - 1

    @property
    def auxiliary_side(self) -> int:
        """Pixels a side of that cell's output for images of `image_size`."""
        side = self.image_size if self.small else (self.image_size - 3) // 2 + 1
        for cell in self.cells[: self.auxiliary_cell + 1]:
            if cell.is_reduction:
                side = ceil(side / 2)
        return side
