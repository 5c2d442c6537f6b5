"""Count what each layer keeps of a micro-batch for its backward, by running it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.model.layers import Layers
from penstock.model.pytree import flatten
from penstock.torch_private import storage_id

from .layer_facts import LayerBytes
from .layer_run import LayerRun, run_alone
from .untouched import as_it_is, untouched

Left = Callable[[nn.Module, list[Tensor]], int]
"""Counts what half a backward leaves of a layer, from the graph of what it gave."""


def measure_bytes(layers: Layers, inputs: Any, left: Left) -> tuple[LayerBytes, ...]:
    """Count what each layer keeps of `inputs` (one micro-batch) for its backward, by storage.

    The model runs once, forward; all is as before afterwards, as in `measure_layers`.
    """
    found: dict[int, LayerBytes] = {}

    def perform(layer: LayerRun) -> Any:
        result, found[layer.step.index] = _counted(layer, left)
        return result

    with untouched([step.module for step in layers]):
        run_alone(layers, inputs, perform)
    return tuple(found.get(step.index, LayerBytes(0, 0, 0, 0, 0)) for step in layers)


def _counted(layer: LayerRun, left: Left) -> tuple[Any, LayerBytes]:
    """Run a layer; return what it gives, and what it keeps."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, as_it_is):
        result = layer.run()
    module = layer.step.module
    for tensor in (*module.parameters(), *module.buffers()):
        saved.pop(storage_id(tensor), None)
    inputs, results = _storages(layer.arguments), _storages(result)
    return result, LayerBytes(
        inner=sum(saved[s] for s in saved.keys() - inputs.keys() - results.keys()),
        inputs=sum(inputs.values()),
        saved_inputs=sum(saved[s] for s in saved.keys() & inputs.keys()),
        results=sum(results.values()),
        saved_results=sum(saved[s] for s in saved.keys() & results.keys() - inputs.keys()),
        left=left(module, flatten(result)[0]),
    )


def _storages(value: Any) -> dict[int, int]:
    """Return the bytes of the storages of a value's tensors, by what tells these apart."""
    return {storage_id(t): t.untyped_storage().nbytes() for t in flatten(value)[0]}
