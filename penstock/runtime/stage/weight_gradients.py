"""Formulas of operators whose weight gradients can be computed later, apart from all others.

The table has the operators with most of the work.  Each formula repeats the operator's backward in
torch, to the bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from penstock.errors import StateError
from penstock.model.entries import is_plain_class, version_of
from penstock.torch_private import (
    has_tensor_hooks,
    saved_numbers,
    saved_tensors,
)

Formula = Callable[..., list[Tensor]]
"""(gradient of the result, saved tensors) -> gradients of the operator's arguments."""
Deferred = tuple[list[int], Formula, list[Tensor]]
"""The places of the arguments, their formula, and the saved tensors that it reads."""

LEAF = "torch::autograd::AccumulateGrad"
"""The name of a node that adds to the `.grad` of a tensor, its `variable`."""
_CAST = "ToCopyBackward0"
PASSING = {
    _CAST,
    "ExpandBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "TBackward0",
    "TransposeBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
"""Nodes with one edge that save no tensor: a gradient may pass them later."""


@dataclass(slots=True)
class Cut:
    """An operator whose weight gradients are computed later.

        operator ──► cast ──► transpose ──► leaf        `ways`: the nodes behind each cut edge

    `reads` are the saved tensors of the formula, with their versions.  `caught` is the gradient of
    the operator's result.  `is_whole`: the operator has no other gradients, or only a bias's.
    """

    edges: dict[int, GradientEdge]
    ways: list[list[Node]]
    formula: Formula
    reads: list[tuple[Tensor, int]]
    is_whole: bool
    caught: list[tuple[Tensor, int] | None] = field(default_factory=list)

    def catch(self, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradient of the result, and its version."""
        gradient = gradients[0]
        self.caught.append(None if gradient is None else (gradient, version_of(gradient)))

    @property
    def needs(self) -> list[tuple[Tensor, int]]:
        """The gradient of the result, if any, and `reads`."""
        return [tensor for tensor in (*self.caught, *self.reads) if tensor is not None]

    def compute(self) -> tuple[list[Tensor], int]:
        """Compute the gradients of the weights; free the tensors that the formula read.

        Return the gradients, and their number of elements minus that of the freed tensors.  A
        StateError refuses tensors that were changed in place since.
        """
        reads, more = [], 0
        for tensor, version in self.needs:
            if version_of(tensor) != version:
                raise StateError(
                    "a tensor that the weight backward needs was changed in place since the input "
                    "backward came to it. Zero the gradients; change a copy, or use a schedule "
                    "whose backward is in one part"
                )
            reads.append(tensor)
            more -= tensor.numel()
        self.reads, self.caught = [], []
        gradients = self.formula(*reads)
        return gradients, more + sum(map(Tensor.numel, gradients))


def cut_of(node: Node, name: str) -> Cut | str:
    """Cut the edges of an operator to its weights; or return why they cannot be cut."""
    deferred = OPERATORS[name](node)
    if deferred is None:
        return "has read what a checkpoint computes again, or has a form that is not known"
    # 1. Refuse operators whose gradient passes other nodes, or whose saved tensors are special.
    places, formula, reads = deferred
    nexts = node.next_functions
    ways = [way for place in places if (way := _way(nexts[place][0]))]
    if len(ways) < len(places):
        return "has a weight that is computed from others"
    if any(
        not is_plain_class(t) or t.layout is not torch.strided or t.is_complex() for t in reads
    ):
        return "reads tensors of another kind than plain ones"
    if _has_hooks(node):  # which may change the gradients of the weights
        return "has hooks"

    # 2. Cut the edges.  A node whose other edges need no gradient will not run at all: its hook
    #    gets the gradient from autograd's result instead.
    edges = {
        place: GradientEdge(way[0], nexts[place][1])
        for place, way in zip(places, ways, strict=True)
    }
    others = [after for place, (after, _) in enumerate(nexts) if place not in edges]
    if name == "AddmmBackward0":
        others = others[-1:]  # the bias is there too, if it is not cut
    is_whole = all(after is None for after in others)
    return Cut(edges, ways, formula, [(t, version_of(t)) for t in reads], is_whole)


def _way(after: Node | None) -> list[Node]:
    """Return the nodes from an operator's edge to a leaf; [] if other than passing nodes are."""
    way: list[Node] = []
    while after is not None:
        way.append(after)
        name = after.name()
        if name == LEAF:
            return way
        after = after.next_functions[0][0] if name in PASSING else None
    return []


def _has_hooks(node: Node) -> bool:
    for register in (node.register_hook, node.register_prehook):
        handle = register(_no_hook)
        hooks = handle.hooks_dict_ref()  # torch keeps all hooks of a node in this dictionary
        handle.remove()
        if hooks:
            return True
    return False


def _no_hook(*_: object) -> None:
    """Change nothing."""


# -- operators: the formulas of torch's own backward --------------------------------------------


def _addmm(node: Node) -> Deferred | None:
    """Leave the bias to the input backward: its gradient is a cheap sum of the result's."""
    product = _product(node, "mat1", 2)
    if product is None or saved_numbers(node, "alpha") != [1]:
        return None
    places, of_weight, reads = product
    way: list[Any] = _way(node.next_functions[0][0])
    if not way or not has_tensor_hooks(way[-1].variable):  # hooks run once, later
        return product
    if saved_numbers(node, "beta") != [1] or any(passed.name() != _CAST for passed in way[:-1]):
        return None
    shape = way[-1].variable.shape

    def of_both(gradient: Tensor, x: Tensor) -> list[Tensor]:
        return [*of_weight(gradient, x), gradient.sum_to_size(shape)]

    return [*places, 0], of_both, reads


def _product(node: Node, name: str, place: int) -> Deferred | None:
    reads, numbers = saved_tensors(node, name), saved_numbers(node, "mat2_sym_strides")
    if reads is None or numbers is None:
        return None
    by_columns = numbers[0] == (1, reads[0].shape[1])  # autograd's gradient has the same layout

    def formula(gradient: Tensor, x: Tensor) -> list[Tensor]:
        if by_columns and gradient.layout is torch.strided:
            return [gradient.t().mm(x).t()]
        return [x.t().mm(gradient)]

    return [place], formula, reads


def _bmm(node: Node) -> Deferred | None:
    reads = saved_tensors(node, "self")

    def formula(gradient: Tensor, x: Tensor) -> list[Tensor]:
        return [x.transpose(1, 2).bmm(gradient)]

    return None if reads is None else ([1], formula, reads)


def _convolution(node: Node) -> Deferred | None:
    reads = saved_tensors(node, "input", "weight")
    settings = saved_numbers(node, *_CONVOLUTION)
    if reads is None or settings is None:
        return None
    has_bias = node.next_functions[2][0] is not None

    def formula(gradient: Tensor, x: Tensor, weight: Tensor) -> list[Tensor]:
        wanted = [False, True, has_bias]
        gradients = torch.ops.aten.convolution_backward(gradient, x, weight, *settings, wanted)
        return [g for g in gradients if g is not None]

    return [1, 2] if has_bias else [1], formula, reads


_CONVOLUTION = (
    "bias_sym_sizes_opt",
    "stride",
    "padding",
    "dilation",
    "transposed",
    "output_padding",
    "groups",
)


def _embedding(node: Node) -> Deferred | None:
    reads = saved_tensors(node, "indices")
    settings = saved_numbers(node, *_EMBEDDING, "sparse")
    if reads is None or settings is None or settings.pop():
        return None
    rows, padding, by_frequency = settings
    padding -= 2**64 if padding >= 2**63 else 0  # a node shows it without its sign

    def formula(gradient: Tensor, indices: Tensor) -> list[Tensor]:
        compute = torch.ops.aten.embedding_dense_backward
        return [compute(gradient, indices, rows, padding, by_frequency)]

    return [0], formula, reads


_EMBEDDING = ("weight_sym_argsize_0", "padding_idx", "scale_grad_by_freq")

OPERATORS: dict[str, Callable[[Node], Deferred | None]] = {
    "AddmmBackward0": _addmm,
    "MmBackward0": partial(_product, name="self", place=1),
    "BmmBackward0": _bmm,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
}
"""The formulas by node name; the input backward computes all other operators."""
