"""An operator as one device of a mesh runs it: the sizes of its part of a product.

    y (B, T, N) = x (B, T, K) w (N, K)      product          rows   columns   depth
                                            forward   y      B T    N         K
                                            backward  dx     B T    K         N
                                            backward  dw     N      K         B T

A cut along a dimension of the product's result divides its rows, columns or batch.  Any other cut
divides its depth: each device then has a summand of the whole result.  A part counts as aligned as
the whole.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

from penstock.costs.counting.graph import Call, TensorSpec
from penstock.costs.records import Operator, Part

from .layouts import Layout, S, State
from .plan import PlannedCall


def divided(
    operator: Operator,
    call: Call,
    planned: PlannedCall,
    mesh: Sequence[int],
    tensors: Sequence[TensorSpec],
) -> Operator:
    """Return one device's part of an operator of a call, which is divided along a mesh's axes."""
    cuts = [axis for axis, choice in enumerate(planned.choices) if choice.cut]
    parts = prod(mesh[axis] for axis in cuts)
    if parts == 1:
        return operator
    share = replace(operator, flops=operator.flops // parts, num_bytes=operator.num_bytes // parts)
    if operator.name not in ("gemm", "attention") or not operator.dims:
        return share
    # 1. Divide the product's sizes, by where each cut is in its result.
    rows, columns, depth = operator.dims
    sizes = _Sizes(rows, columns, depth, operator.batch)
    num_dims, layout = _result(operator, call, planned, tensors)
    for axis in cuts:
        state = layout[axis] if num_dims else S(0)
        sizes = sizes.cut(state, num_dims, mesh[axis])
    share = replace(share, dims=sizes[:3], batch=sizes.batch)
    # 2. A summand has as many bytes as the whole result; fused attention has no summands.
    if operator.name == "gemm":
        of_part = _numbers(share) / _numbers(operator)
        share = replace(share, num_bytes=round(operator.num_bytes * of_part))
    return share


class _Sizes(NamedTuple):
    """The sizes of a matrix product, and how many of it there are."""

    rows: int
    columns: int
    depth: int
    batch: int

    def cut(self, state: State, num_dims: int, number: int) -> "_Sizes":
        """Return the sizes of the largest of `number` parts, by a state of the result."""
        if not isinstance(state, S):
            return self._replace(depth=-(-self.depth // number))
        if state.dim == num_dims - 1:
            return self._replace(columns=-(-self.columns // number))
        if state.dim == num_dims - 2 or self.batch == 1:
            return self._replace(rows=-(-self.rows // number))
        return self._replace(batch=-(-self.batch // number))


def _result(
    operator: Operator, call: Call, planned: PlannedCall, tensors: Sequence[TensorSpec]
) -> tuple[int, Layout]:
    """Return the dimensions and the layout of what a product computes; (0, ()) if none is found.

    In a backward that is the gradient of an argument with as many numbers.
    """
    size, is_attention = prod(operator.dims[:2]) * operator.batch, operator.name == "attention"
    if operator.part is Part.FORWARD or is_attention:
        pairs = [*zip(call.gives, planned.gives, strict=False)]
    else:
        pairs = [*zip(call.takes, planned.takes, strict=False)]
        is_of_weight = operator.part is Part.WEIGHT
        pairs.sort(key=lambda pair: bool(tensors[pair[0]].name) is not is_of_weight)
    for number, layout in pairs:
        shape = tensors[number].shape
        if is_attention or prod(shape) == size:
            return len(shape), layout
    return 0, ()


def _numbers(product: Operator) -> int:
    """Return how many numbers a product reads and writes."""
    rows, columns, depth = product.dims
    return product.batch * (rows * depth + depth * columns + rows * columns)
