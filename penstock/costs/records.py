"""Costs of a layer for one micro-batch: operators, seconds and bytes.

Layers that are alike are there once, as a `LayerKind`; `AtSize` says which layer is of which kind.
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSeconds:
    """Seconds of one layer for one micro-batch, measured (medians over repeats) or by a roofline.

    `backward_s` is a whole backward; `input_s` and `weight_s` are one in two parts, which cost
    a little more together.  In measured ones gradients of weights are added to others.
    `spread` is half the distance between the quartiles of forward plus backward, as a share of
    their median.
    """

    forward_s: float
    recompute_s: float
    backward_s: float
    input_s: float
    weight_s: float
    spread: float = 0.0
    is_measured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Operators of a layer for one micro-batch, and the bytes that it keeps for its backward.

    `inner_bytes` is what it saves beside the values that come in and go out, each storage once;
    `left_bytes` what the input part of a divided backward leaves to the other one, at most.
    """

    operators: tuple[Operator, ...]
    inner_bytes: int
    left_bytes: int
    draws: bool = False
    """True where it draws random numbers."""
    seconds: LayerSeconds | None = None
    """Measured, or by the roofline of a device; None where it was only counted."""
    busy_seconds: LayerSeconds | None = None
    """Measured while all cores of the host are busy with such work."""

    @property
    def num_forward(self) -> int:
        """Operators of its forward."""
        return sum(x.count for x in self.operators if x.part is Part.FORWARD)

    @property
    def num_backward(self) -> int:
        """Operators of a whole backward."""
        return sum(x.count for x in self.operators) - self.num_forward


@dataclass(frozen=True, slots=True)
class Value:
    """A value between layers: a tensor, or several together.

    `producer` is the layer's number, -1 for the model's input; `consumers` are in order.  The last
    layer's value has none: it goes to the loss.  `storage` is equal for values that share memory.
    With `has_gradient` a gradient of as many bytes comes back.  With `is_weight` it is a
    parameter that later layers use too; the first of its layers has it.
    """

    producer: int
    consumers: tuple[int, ...]
    num_bytes: int
    storage: int
    has_gradient: bool = True
    is_weight: bool = False

    def touches(self, layer: int) -> bool:
        """Tell whether a layer gives the value or is given it."""
        return self.producer == layer or layer in self.consumers


@dataclass(frozen=True, slots=True, kw_only=True)
class AtSize:
    """A model's layers for micro-batches of one size.

    `kind_of[n]` is the place of layer n's kind in `kinds`, `saved[n]` are the places in `values`
    of what it saves for its backward of what comes in and goes out.  `loss` is what the loss
    function costs, where it was given, `loss_saved` what it saves of the model's output, and
    `target_bytes` are those of its targets: the stage that computes it keeps them from the forward
    on, as the first stage keeps the model's input.
    """

    microbatch_size: int
    kinds: tuple[LayerKind, ...]
    kind_of: tuple[int, ...]
    values: tuple[Value, ...]
    saved: tuple[tuple[int, ...], ...]
    loss: LayerKind | None = None
    loss_saved: tuple[int, ...] = ()
    target_bytes: int = 0

    def layer(self, number: int) -> LayerKind:
        """Return what is known of a layer."""
        return self.kinds[self.kind_of[number]]

    def seconds(self, number: int) -> LayerSeconds:
        """Return the seconds of a layer, where they are known."""
        found = self.layer(number).seconds
        assert found is not None, "it was measured, or is known for a device"
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Bytes of a layer's parameters; one that layers share is counted in the first of them."""

    parameter_bytes: int
    gradient_bytes: int
    """Of those that want gradients."""
    optimizer_bytes: int
    """State of the optimizer."""
    buffer_bytes: int = 0
    num_norms: int = 0
    """BatchNorms, whose running statistics move once in a step."""
    partial_bytes: int = 0
    """Of gradients of which each shard has a part: they are summed once in a step."""

    @property
    def total_bytes(self) -> int:
        """Bytes of weights, gradients and state together."""
        weights = self.parameter_bytes + self.buffer_bytes
        return weights + self.gradient_bytes + self.optimizer_bytes
