"""Compute a loss from an output that the last layer leaves in slices.

    last layer ──S(2)──► flatten ──S(1)──► cross_entropy ──I──► loss, whole on each device
                         target  ──R─────┘

The loss is one more layer.  Its calls are recorded and divided at its first micro-batch, since
targets are not known before.  A function without a rule takes whole values.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.costs.counting.count import record_graph
from penstock.model.entries import layout_on, whole_size
from penstock.model.layer_list import as_layers
from penstock.model.layers import Layers
from penstock.model.pytree import flatten, unflatten
from penstock.sharding.layouts import I, Layout, S
from penstock.sharding.plan import LayerSharding
from penstock.sharding.routed import why_whole

from .divided import Axes, DividedLayer, Noted, called_alike
from .run import OtherPathError

Layouts = tuple[Layout | None, ...]
"""The layout of each tensor of an output and its target; None for a whole tensor."""


class _LossLayer(nn.Module):
    """A loss as a layer, whose input is (output, target)."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, pair: tuple[Any, Any]) -> Tensor:
        loss: Tensor = self.loss(*pair)
        return loss


class DividedLoss:
    """Computes a loss in shards along axes, as layer number `index`."""

    def __init__(self, index: int, loss: Any, axes: Axes) -> None:
        self._index, self._layer, self._axes = index, _LossLayer(loss), axes
        self._divided: dict[Any, DividedLayer | None] = {}
        """The loss for each kind of output and target; None where it needs whole values."""

    def call(self, function: "partial[Any]", noted: Noted) -> Any:
        """Return the loss, whole on each device; all devices must make the same calls.

        A loss that reads values, draws random numbers or takes another path than in its first
        micro-batch gets its output whole.
        """
        pair = function.args[-2:]
        leaves, _ = flatten(pair)
        layouts = tuple(map(layout_on, leaves))
        if not any(layouts):
            return function()
        kind = tuple(
            (leaf.dtype, _without_sizes(layout), *(n == 1 for n in _whole_shape(leaf, layout)))
            for leaf, layout in zip(leaves, layouts, strict=True)
        )
        if kind not in self._divided:
            self._divided[kind] = self._planned(pair, layouts)
        divided, compute = self._divided[kind], partial(self._layer.forward, pair)
        if divided is not None:
            try:
                return divided.call(compute, noted)
            except OtherPathError:  # all devices raise it alike
                self._divided[kind] = None
        return called_alike(None, self._axes, compute, noted)

    def _planned(self, pair: Any, layouts: Layouts) -> DividedLayer | None:
        """Record the loss on tensors of whole sizes without values, and divide its calls."""
        leaves, structure = flatten(pair)
        whole = [
            leaf.detach()
            if layout is None
            else torch.empty(
                _whole_shape(leaf, layout),
                dtype=leaf.dtype,
                device="meta",
                requires_grad=leaf.requires_grad,
            )
            for leaf, layout in zip(leaves, layouts, strict=True)
        ]
        pair = unflatten(structure, whole)
        try:
            plan = _plan(as_layers([self._layer]), pair, layouts, self._axes)
        except Exception:  # of any class: it is the user's code, which now runs on whole values
            return None
        if plan is None:
            return None
        return DividedLayer(self._index, self._layer, plan, self._axes)


def _plan(layers: Layers, pair: Any, layouts: Layouts, axes: Axes) -> LayerSharding | None:
    """Return the division of the loss; None if it cannot be divided."""
    # the solver takes a while to import
    from penstock.sharding.costs import Costs
    from penstock.sharding.program import LayerProgram, Task, priced

    graph = record_graph(layers, pair)
    numbers = sorted(graph.entering[0])  # in the order of the tensors
    is_known = len(numbers) == len(layouts)
    if not is_known or why_whole(graph, 0) or any(call.draws for call in graph.calls):
        return None
    entering = zip(numbers, map(_without_sizes, layouts), strict=True)
    borders = {number: layout for number, layout in entering if layout is not None}
    costs = Costs.usual([axis.size for axis in axes])
    task = Task(costs=costs, allow=lambda *_: True, rests=lambda *_: (I,))
    program = LayerProgram(graph, 0, task, borders)
    solved = program.solve(_BYTE_S)
    return priced(graph, layers.steps[0].path, costs, program.calls, solved, borders)


_BYTE_S = 1e-7
"""Seconds per byte: the price at which slices stay slices, even if small ones gather faster."""


def _whole_shape(tensor: Tensor, layout: Layout | None) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    return shape if layout is None else whole_size(shape, None, layout)[0]


def _without_sizes(layout: Layout | None) -> Layout | None:
    if layout is None:
        return None
    return tuple(S(state.dim) if isinstance(state, S) else state for state in layout)
