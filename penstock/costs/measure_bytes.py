"""Count what each layer keeps of a micro-batch for its backward, by running it."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.model.entries import no_leaf
from penstock.model.kept import run_unnoticed
from penstock.model.layers import Layers
from penstock.model.pytree import flatten, tree_map
from penstock.model.stage_plan import Crossing, Step
from penstock.torch_private import storage_id

from .count import Left, touches, values_of
from .layer_run import as_it_is, untouched
from .profile import AtSize, LayerKind
from .step_timer import CallLayer


def measure_bytes(
    layers: Layers, inputs: Any, left: Left, *, call: CallLayer | None = None
) -> AtSize:
    """Count what each layer keeps of `inputs` (one micro-batch) for its backward, by storage.

    The model runs once, forward, each layer with a graph of its own; all is as before afterwards,
    as in `measure_layers`.  Forwards run by `call`.  A loss is taken to save as much as the model
    gives.
    """

    def run() -> tuple[_Kept, tuple[Crossing, ...]]:
        kept = _Kept(layers, left, call)
        with untouched([step.module for step in layers]):
            given = tree_map(Tensor.detach, inputs)
            return kept, layers.source.run_noting(given, kept.perform)[1]

    kept, crossings = run_unnoticed(layers.modules, run)
    values, storages = values_of(crossings, kept.same)
    saved, inner = [], []
    for n in range(len(layers)):
        own = kept.saved.get(n, {})
        touched = [p for p, v in enumerate(values) if touches(n, v, len(layers))]
        at_boundary = {storages[place] for place in touched}
        saved.append(tuple(p for p in touched if storages[p] in own))
        inner.append(sum(own[s] for s in own.keys() - at_boundary))
    given = {v.storage: v.num_bytes for v in values if not v.consumers}
    return AtSize(
        microbatch_size=1,
        kinds=tuple(
            LayerKind(operators=(), inner_bytes=inside, left_bytes=kept.left.get(n, 0))
            for n, inside in enumerate(inner)
        ),
        kind_of=tuple(range(len(layers))),
        values=values,
        saved=tuple(saved),
        loss=LayerKind(operators=(), inner_bytes=sum(given.values()), left_bytes=0),
    )


class _Kept:
    """What layers were seen to save while they ran: bytes, by layer and by storage."""

    def __init__(self, layers: Layers, left: Left, call: CallLayer | None) -> None:
        self._layers, self._left_of = layers, left
        self._call: CallLayer = call or (lambda step, run: run())
        self.saved: dict[int, dict[int, int]] = {}
        self.left: dict[int, int] = {}
        self.same: dict[int, int] = {}
        """Storages of what layers give that is what they were given, and of that."""

    def perform(self, step: Step, function: Any) -> Any:
        """Run a layer on copies of what it is given, which it may change in place; what it gives
        leads to no graph.
        """
        if step.index >= len(self._layers):  # a random operation between layers
            return function()
        tensors = (*step.module.parameters(), *step.module.buffers())
        device = tensors[0].device if tensors and self._layers.model is None else None
        lent: dict[int, int] = {}  # storages of copies, and of what they are copies of
        found: dict[int, int] = {}

        def enter(tensor: Tensor) -> Tensor:
            wants_gradient = tensor.requires_grad and tensor.layout is torch.strided
            copy = tensor.detach().to(device, copy=True)
            if wants_gradient:
                copy = no_leaf(copy.requires_grad_())  # which may be changed in place
            own = storage_id(tensor)
            lent[storage_id(copy)] = self.same.get(own, own)
            return copy

        def pack(tensor: Tensor) -> Tensor:
            found[storage_id(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        args, keywords = tree_map(enter, (function.args, function.keywords))
        with saved_tensors_hooks(pack, as_it_is):
            result = self._call(step, partial(function.func, *args, **keywords))
        for tensor in tensors:
            found.pop(storage_id(tensor), None)
        self.saved[step.index] = {lent.get(s, s): size for s, size in found.items()}
        results = flatten(result)[0]
        self.left[step.index] = self._left_of(step.module, results)
        own_storages = {storage_id(tensor) for tensor in results}
        self.same.update({s: lent[s] for s in own_storages & lent.keys()})
        return tree_map(_leave, result)


def _leave(tensor: Tensor) -> Tensor:
    return no_leaf(tensor.detach().requires_grad_(tensor.requires_grad))
