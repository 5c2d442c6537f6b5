"""One training step of the unsplit model, in this thread, drawing from torch's own generators."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.model.layers import MODEL_INPUT, Layers, Value, call, join_output
from penstock.pipeline import LossFunction, Pipeline
from penstock.runtime.batch_norm import (
    MomentsByModule,
    batch_norms,
    commit_statistics,
    separate_statistics,
)
from penstock.runtime.microbatches import batch_size, gather, loss_weights, microbatch_sizes, split
from penstock.runtime.random_streams import stream_key
from penstock.types import Reduction

from .result import Result, as_modules, collect, digests


def run_unsplit(
    layers: Layers,
    batch: tuple[Any, Any],
    loss: LossFunction,
    reduction: Reduction | Callable[[Any], Any],
    pipe: Pipeline,
) -> Result:
    """Run the layers in order, drawing from torch's own generator, seeded anew for each layer."""
    inputs, targets = batch
    sizes = microbatch_sizes(batch_size(inputs, "inputs"), pipe.num_microbatches)
    target_parts = split(targets, sizes)
    weights = loss_weights(reduction, target_parts, sizes)
    moments: MomentsByModule = {}
    total: Tensor | None = None
    modules = batch_norms([*(step.module for step in layers), *as_modules(loss)])
    with digests(layers) as seen, torch.random.fork_rng(_cuda_numbers(pipe)):
        for i, part in enumerate(split(inputs, sizes)):
            with separate_statistics(modules, moments):
                output = _run_seeded(layers, part, pipe.seed, i)
                torch.manual_seed(stream_key(pipe.seed, "train", 0, len(layers), i))
                value = loss(output, target_parts[i])
            if weights[i]:
                _run_backward(value, weights[i], modules)
                weighted = value.detach() * weights[i]
                total = weighted if total is None else total + weighted
    commit_statistics(moments)
    return collect(layers, loss, total, _evaluate(layers, inputs, sizes), seen)


def _run_backward(value: Tensor, weight: float, modules: tuple[_BatchNorm, ...]) -> None:
    with torch.autocast(value.device.type, enabled=False), separate_statistics(modules, None):
        torch.autograd.backward(value, torch.full_like(value, weight))


def _cuda_numbers(pipe: Pipeline) -> list[int]:
    return sorted({device.index for device in pipe.devices if device.type == "cuda"})


def _run_seeded(layers: Layers, inputs: Any, seed: int, microbatch: int) -> Any:
    values: dict[Value, Any] = {MODEL_INPUT: inputs}
    for step in layers:
        key = stream_key(seed, "train", 0, step.index, microbatch)
        torch.manual_seed(key)
        values.update(call(step, [values[v] for v in step.inputs]))
    return join_output([values[v] for v in layers.output])


def _evaluate(layers: Layers, inputs: Any, sizes: list[int]) -> Any:
    modes = [(m, m.training) for step in layers for m in step.module.modules()]
    for module, _ in modes:
        module.training = False
    with torch.no_grad():
        outputs = gather([layers.run(part) for part in split(inputs, sizes)], sizes)
    for module, training in modes:
        module.training = training
    return outputs
