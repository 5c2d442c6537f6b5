"""Costs of a layer for one micro-batch: operators, seconds and bytes.

Equal layers share a `LayerKind`; `AtSize` has the kind of each layer.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Self


class Part(Enum):
    """The part of a step that an operator belongs to."""

    FORWARD = "forward"
    INPUT = "input"
    """The part of a backward that computes gradients of the layer's inputs."""
    WEIGHT = "weight"
    """The part of a backward that computes gradients of weights only."""


PRODUCTS = ("gemm", "attention", "conv1x1", "conv3x3", "conv")
"""Classes of operators that cost the slower of FLOPs and bytes."""
MOVES = ("norm", "pool", "reduce", "elementwise", "embedding", "copy")
"""Classes of operators that cost their bytes."""
VIEW = "view"
"""The class of operators whose results are views: the host issues them, and no kernel runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Equal operators in one part of a layer's work."""

    name: str
    """The class, one of `PRODUCTS` or `MOVES`, or `VIEW`."""
    part: Part
    flops: int
    """FLOPs of each."""
    num_bytes: int
    """Bytes that each reads and writes."""
    dims: tuple[int, ...] = ()
    """Rows, columns and depth of the matrix product or convolution; () for all else."""
    batch: int = 1
    """Matrix products of one operator."""
    dtype: str = "float32"
    count: int = 1
    """Number of these operators."""
    alignment: int = 8
    """The largest power of two, at most 8, that divides the lengths of a matrix product's rows in
    memory, in numbers.
    """


def flops_of(operators: Iterable[Operator]) -> tuple[int, str]:
    """Return the FLOPs of operators, and the dtype that has most of them; "" without any."""
    by_dtype = Counter[str]()
    for operator in operators:
        by_dtype[operator.dtype] += operator.flops * operator.count
    return by_dtype.total(), max(by_dtype, key=by_dtype.__getitem__, default="")


PARTS = ("forward_s", "recompute_s", "backward_s", "input_s", "weight_s")
"""The parts of a step in `LayerSeconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Seconds of one layer for one micro-batch, measured (medians over repeats) or by a roofline.

    Measured backwards add the gradients of weights to others.
    """

    forward_s: float
    recompute_s: float
    backward_s: float
    """Seconds of a whole backward."""
    input_s: float
    """Seconds of the first part of a divided backward; the parts take longer together."""
    weight_s: float
    """Seconds of its second part."""
    spread: float = 0.0
    """Half the interquartile range of forward plus backward, as a share of their median."""
    is_measured: bool = True

    def plus(self, other: "LayerSeconds") -> "LayerSeconds":
        """Return the seconds of both, one after the other."""
        return LayerSeconds(**{name: getattr(self, name) + getattr(other, name) for name in PARTS})


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Costs of equal layers for one micro-batch."""

    operators: tuple[Operator, ...]
    inner_bytes: int
    """Bytes saved for the backward beside inputs and results, each storage once."""
    left_bytes: int
    """Most bytes that the input part of a divided backward leaves for the weight part."""
    draws: bool = False
    """True if the layer draws random numbers."""
    seconds: LayerSeconds | None = None
    """Seconds measured, or by the roofline of a device; None if only counted."""
    busy_seconds: LayerSeconds | None = None
    """Seconds measured while all cores of the host run such layers."""

    @property
    def num_forward(self) -> int:
        return sum(x.count for x in self.operators if x.part is Part.FORWARD)

    @property
    def num_backward(self) -> int:
        """Operators of a whole backward."""
        return sum(x.count for x in self.operators) - self.num_forward


@dataclass(frozen=True, slots=True)
class Value:
    """A value between layers: a tensor, or several together."""

    producer: int
    """Number of the layer that makes it; -1 for the model's input."""
    consumers: tuple[int, ...]
    """Numbers of the layers that use it, in order; () for the model's output."""
    num_bytes: int
    storage: int
    """A number that values in the same memory share."""
    has_gradient: bool = True
    """True if a gradient of as many bytes comes back."""
    is_weight: bool = False
    """True for a parameter that several layers use; the first of them is the producer."""

    def touches(self, layer: int) -> bool:
        """Tell if a layer makes the value or uses it."""
        return self.producer == layer or layer in self.consumers


@dataclass(frozen=True, slots=True, kw_only=True)
class AtSize:
    """Costs of a model's layers for micro-batches of one size."""

    microbatch_size: int
    """Samples of a micro-batch."""
    kinds: tuple[LayerKind, ...]
    kind_of: tuple[int, ...]
    """Place in `kinds`, by layer."""
    values: tuple[Value, ...]
    saved: tuple[tuple[int, ...], ...]
    """Places in `values` of inputs and results that a layer saves for its backward, by layer."""
    loss: LayerKind | None = None
    """Costs of the loss function, if there was one."""
    loss_saved: tuple[int, ...] = ()
    """Places in `values` of outputs of the model that the loss saves."""
    target_bytes: int = 0
    """Bytes of targets, which the last stage keeps as the first one keeps the model's input."""

    def layer(self, number: int) -> LayerKind:
        return self.kinds[self.kind_of[number]]

    def with_kinds(self, change: Callable[[LayerKind], LayerKind]) -> Self:
        """Return the costs with every kind of layer changed, and the loss."""
        loss = None if self.loss is None else change(self.loss)
        return replace(self, kinds=tuple(map(change, self.kinds)), loss=loss)

    def seconds(self, number: int) -> LayerSeconds:
        """Return the seconds of a layer, which have to be known."""
        seconds = self.layer(number).seconds
        assert seconds is not None, "it was measured, or is known for a device"
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Bytes of a layer's parameters; the first of several layers counts a shared one."""

    GONE_FIELDS: ClassVar = ("partial_bytes",)
    """Fields of older files, which are left out."""

    parameter_bytes: int
    gradient_bytes: int
    """Bytes of gradients."""
    optimizer_bytes: int
    """Bytes of optimizer state."""
    buffer_bytes: int = 0
    num_norms: int = 0
    """Number of BatchNorms, whose running statistics move once a step."""
    update_bytes: int = 0
    """Bytes that the optimizer reads and writes in a step; 0: nobody has counted them."""

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, gradients and state together."""
        weights = self.parameter_bytes + self.buffer_bytes
        return weights + self.gradient_bytes + self.optimizer_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that the optimizer moves in a step: as counted, or each tensor once each way."""
        if not self.gradient_bytes:
            return 0
        once = 2 * self.parameter_bytes + self.gradient_bytes + 2 * self.optimizer_bytes
        return self.update_bytes or once
