"""What a layer computes, as a list of operators: the same on every device, priced for each."""

from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """The part of a step that an operator belongs to."""

    FORWARD = "forward"
    INPUT = "input"
    """Of a backward, what gives gradients of the layer's inputs."""
    WEIGHT = "weight"
    """Of a backward, what only gives gradients of its weights."""


PRODUCTS = ("gemm", "attention", "conv1x1", "conv3x3", "conv")
"""Classes that are priced by FLOPs and bytes, the slower of the two."""
MOVES = ("norm", "pool", "reduce", "elementwise", "embedding", "copy")
"""Classes that are priced by bytes."""
CLASSES = (*PRODUCTS, *MOVES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """`count` operators of one class and one size, in one part of a layer's work.

    `num_bytes` are read and written ones of each.  `dims` are rows, columns and depth of a matrix
    product, or of the one that a convolution amounts to; `batch` how many of these are done at
    once.  Of other classes they are empty.
    """

    name: str
    """Of `CLASSES`."""
    part: Part
    flops: int
    num_bytes: int
    dims: tuple[int, ...] = ()
    batch: int = 1
    dtype: str = "float32"
    count: int = 1
