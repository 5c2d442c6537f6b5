"""Count the bytes that each layer keeps for its backward, by a run of the model."""

from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.costs.counting.count import Left, divided_bytes, values_of
from penstock.costs.counting.layer_calls import as_it_is
from penstock.costs.records import AtSize, LayerKind
from penstock.model.copies import no_leaf
from penstock.model.kept import run_unnoticed
from penstock.model.layers import Layers
from penstock.model.materialize import tensors_of
from penstock.model.pytree import flatten, tree_map
from penstock.model.stage_plan import Step
from penstock.torch_private import storage_id

from .layer_run import (
    CallLayer,
    call_alone,
    device_of,
    named,
    untouched,
    wants_gradient,
)


def measure_bytes(
    layers: Layers, inputs: Any, left: Left, *, call: CallLayer = call_alone
) -> AtSize:
    """Return the bytes that each layer keeps of `inputs` (one micro-batch), each storage once.

    The model runs one forward by `call`, each layer with a separate graph; it stays unchanged, as
    in `measure`.  A loss counts as if it saved the model's output.
    """

    def run() -> AtSize:
        with untouched([step.module for step in layers]):
            return _Kept(layers, left, call).at_size(tree_map(Tensor.detach, inputs))

    return run_unnoticed(layers.modules, run)


class _Kept:
    """Bytes that layers save while they run, by layer and by storage."""

    def __init__(self, layers: Layers, left: Left, call: CallLayer) -> None:
        self._layers, self._left_of, self._call = layers, left, call
        self._saved: dict[int, dict[int, int]] = {}
        self._left: dict[int, int] = {}
        self._same: dict[int, int] = {}
        """Storages of arguments, by the storages of results that share their memory."""

    def at_size(self, inputs: Any) -> AtSize:
        """Run the model, and return the bytes of each layer."""
        _, crossings = self._layers.run_noting(inputs, self._perform)
        values, storages = values_of(crossings, self._same)
        numbers = range(len(self._layers))
        of_layers = [
            divided_bytes([v.touches(n) for v in values], storages, self._saved.get(n, {}))
            for n in numbers
        ]
        outputs = {v.storage: v.num_bytes for v in values if not v.consumers}
        return AtSize(
            microbatch_size=1,
            kinds=tuple(
                LayerKind(operators=(), inner_bytes=inner, left_bytes=self._left.get(n, 0))
                for n, (inner, _) in enumerate(of_layers)
            ),
            kind_of=tuple(numbers),
            values=values,
            saved=tuple(places for _, places in of_layers),
            loss=LayerKind(operators=(), inner_bytes=sum(outputs.values()), left_bytes=0),
        )

    def _perform(self, step: Step, function: Any) -> Any:
        """Run a layer on copies of its arguments; return results without a graph.

        argument ──copy──► storage 2 ──► layer ──► result     a saved storage of a copy counts
        storage 1           lent[2] = 1     └─ saves 2        as the argument's: 1
        """
        if step.index >= len(self._layers):  # a random operation between layers
            return function()
        device = device_of(step.module) if self._layers.model is None else None
        lent: dict[int, int] = {}  # storages of arguments, by storages of their copies
        saved: dict[int, int] = {}  # bytes by storage

        def enter(tensor: Tensor) -> Tensor:
            copy = tensor.detach().to(device, copy=True)
            if wants_gradient(tensor):
                copy = no_leaf(copy.requires_grad_())  # which may be changed in place
            storage = storage_id(tensor)
            lent[storage_id(copy)] = self._same.get(storage, storage)
            return copy

        def pack(tensor: Tensor) -> Tensor:
            saved[storage_id(tensor)] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        # 1. Run the layer on copies of its arguments, so that its graph is separate.
        args, keywords = tree_map(enter, (function.args, function.keywords))
        with named(step), saved_tensors_hooks(pack, as_it_is):
            result = self._call(step, partial(function.func, *args, **keywords))
        # 2. Count what it saves beside its weights, by storages of the original arguments.
        for tensor in tensors_of(step.module):
            saved.pop(storage_id(tensor), None)
        self._saved[step.index] = {lent.get(s, s): size for s, size in saved.items()}
        # 3. Note results that share memory with arguments: a later layer may save them.
        results = flatten(result)[0]
        self._left[step.index] = self._left_of(step.module, results)
        own_storages = {storage_id(tensor) for tensor in results}
        self._same.update({s: lent[s] for s in own_storages & lent.keys()})
        return tree_map(_leave, result)


def _leave(tensor: Tensor) -> Tensor:
    return no_leaf(tensor.detach().requires_grad_(tensor.requires_grad))
