"""The cells of AmoebaNet-B and -D as data: operations and their inputs.

Every cell has seven states.  State 0 is the output of the last cell, brought to the cell's width;
state 1 is the output of the last cell but one.  States 2 to 6 are sums of two operations on
earlier states.  A cell's output is the concatenation of some states.

Real et al. 2019 (arXiv 1802.01548), figures 2 and 6, describe the search that found them.  The
tables below follow the public TPU code (tensorflow/tpu, models/official/amoeba_net), which trained
the networks.  The paper's drawings differ in places; its authors called the drawing of AmoebaNet-A
a mistake (tensorflow/tpu issue 312), and only the code's tables give the published sizes.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Step(NamedTuple):
    """An operation by its name in operations.py, and the number of the state that it reads."""

    operation: str
    state: int


NUM_INPUTS = 2
"""Number of states that are inputs of the cell."""


@dataclass(frozen=True, slots=True)
class CellGenotype:
    """A cell: pairs of operations, whose sums are states 2, 3, ...; and its outputs."""

    sums: tuple[tuple[Step, Step], ...]
    outputs: tuple[int, ...]

    def __post_init__(self) -> None:
        for number, pair in enumerate(self.sums, NUM_INPUTS):
            assert all(0 <= step.state < number for step in pair)
        assert all(0 <= state < NUM_INPUTS + len(self.sums) for state in self.outputs)


@dataclass(frozen=True, slots=True)
class Genotype:
    """The two kinds of cells of a network."""

    normal: CellGenotype
    reduction: CellGenotype


AMOEBANET_D = Genotype(
    normal=CellGenotype(
        sums=(
            (Step("conv_1x1", 1), Step("max_pool_3x3", 1)),
            (Step("none", 1), Step("conv_1x7_7x1", 0)),
            (Step("conv_1x1", 0), Step("conv_1x7_7x1", 0)),
            (Step("max_pool_3x3", 2), Step("none", 2)),
            (Step("avg_pool_3x3", 1), Step("conv_1x1", 5)),
        ),
        outputs=(0, 3, 4, 6),
    ),
    reduction=CellGenotype(
        sums=(
            (Step("max_pool_2x2", 0), Step("max_pool_3x3", 0)),
            (Step("none", 2), Step("conv_3x3", 1)),
            (Step("conv_1x7_7x1", 2), Step("max_pool_3x3", 2)),
            (Step("none", 3), Step("max_pool_2x2", 1)),
            (Step("avg_pool_3x3", 2), Step("conv_1x1", 3)),
        ),
        outputs=(4, 5, 6),
    ),
)

AMOEBANET_B = Genotype(
    normal=CellGenotype(
        sums=(
            (Step("conv_1x1", 1), Step("max_pool_3x3", 1)),
            (Step("none", 1), Step("separable_3x3_twice", 0)),
            (Step("conv_1x1", 1), Step("separable_3x3_twice", 0)),
            (Step("conv_1x1", 2), Step("none", 2)),
            (Step("avg_pool_3x3", 1), Step("conv_1x1", 5)),
        ),
        outputs=(0, 3, 4, 6),
    ),
    reduction=CellGenotype(
        sums=(
            (Step("max_pool_2x2", 0), Step("max_pool_3x3", 0)),
            (Step("none", 2), Step("conv_3x3", 1)),
            # The TPU code's name says "dilated by 2", but it has no dilation.
            (Step("separable_5x5_twice", 2), Step("max_pool_3x3", 2)),
            (Step("none", 3), Step("separable_3x3_twice", 1)),
            (Step("avg_pool_3x3", 4), Step("conv_1x1", 3)),
        ),
        outputs=(5, 6),
    ),
)
