"""One training step of the unsplit model in plain torch: in this thread, drawing from torch's own
generators, Python's and NumPy's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.mesh import Mesh
from penstock.model.layers import Layers
from penstock.model.owned import modules_of_loss
from penstock.model.stage_plan import Step
from penstock.model.state import in_evaluation
from penstock.pipeline import Pipeline
from penstock.runtime.batch_norm import batch_norms
from penstock.runtime.microbatches import Batch, Call, LossFunction, Splitter
from penstock.runtime.outputs import gather
from penstock.runtime.random.generators import StreamBetween, kept_outside, seed_outside
from penstock.runtime.random.streams import BETWEEN, stream_key
from penstock.types import Reduction

from .report import Result, collect, digests
from .statistics import ExpectedStatistics


def run_unsplit(
    layers: Layers,
    batch: tuple[Any, Any],
    loss: LossFunction,
    reduction: Reduction | Callable[[Any], Any],
    pipe: Pipeline,
) -> Result:
    """Run the layers in order, drawing from torch's own generator, seeded anew for each layer."""
    mesh = Mesh.of_one_process()
    computes = loss is layers.own_loss
    call = Call(pipe.num_microbatches, reduction, trains=True, computes_loss=computes)
    cut = Splitter(mesh, mesh.placement).cut(*batch, call)
    total: Tensor | None = None
    norms = batch_norms([*(step.module for step in layers), *modules_of_loss(loss)])
    statistics = ExpectedStatistics(norms)
    forked = torch.random.fork_rng(_cuda_numbers(pipe))
    with digests(layers) as seen, forked, kept_outside():
        for i, part in enumerate(cut.inputs):
            with statistics.watching():
                output = _run_seeded(layers, part, pipe.seed, "train", i)
                _seed(stream_key(pipe.seed, "train", 0, len(layers), i))
                value = loss(output, cut.targets[i])
            if cut.weights[i]:
                _run_backward(value, cut.weights[i])
                weighted = value.detach() * cut.weights[i]
                total = weighted if total is None else total + weighted
    statistics.put()
    with torch.random.fork_rng(_cuda_numbers(pipe)), kept_outside():
        outputs = _evaluate(layers, cut, pipe.seed)
    return collect(layers, loss, total, outputs, seen)


def _run_backward(value: Tensor, weight: float) -> None:
    with torch.autocast(value.device.type, enabled=False):
        torch.autograd.backward(value, torch.full_like(value, weight))


def _cuda_numbers(pipe: Pipeline) -> list[int]:
    return sorted({device.index for device in pipe.devices if device.type == "cuda"})


def _run_seeded(layers: Layers, inputs: Any, seed: int, phase: str, microbatch: int) -> Any:
    def seeded(step: Step, function: Callable[[], Any]) -> Any:
        _seed(stream_key(seed, phase, 0, step.index, microbatch))
        return function()

    with StreamBetween(stream_key(seed, phase, 0, BETWEEN, microbatch)) as stream:
        return layers.run(inputs, partial(stream.run_layer, seeded))


def _seed(key: int) -> None:
    torch.manual_seed(key)
    seed_outside(key)


def _evaluate(layers: Layers, batch: Batch, seed: int) -> Any:
    modules = [module for _, holder in layers.holders() for module in holder.modules()]
    with torch.no_grad(), in_evaluation(modules):
        every = enumerate(batch.inputs)
        parts = [_run_seeded(layers, part, seed, "eval", i) for i, part in every]
        return gather(parts, batch.sizes, batch.output_weights)
