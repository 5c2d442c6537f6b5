"""One training step of the unsplit model in plain torch, in this thread.

Layers draw from the generators of torch, Python and NumPy.  BatchNorm layers keep their own
statistics and momentum during the step.  A hook reads their inputs, from which `_Statistics`
computes the statistics of the whole mini-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.mesh import Mesh
from penstock.model.layers import Layers
from penstock.model.owned import modules_of_loss
from penstock.model.stage_plan import Step
from penstock.model.state import in_evaluation
from penstock.pipeline import Pipeline
from penstock.runtime.batch_norm import batch_norms
from penstock.runtime.gradient_dtype import widen_gradients
from penstock.runtime.microbatches import Call, LossFunction, Splitter
from penstock.runtime.outputs import gather
from penstock.runtime.random.generators import StreamBetween, kept_outside, seed_outside
from penstock.runtime.random.streams import BETWEEN, stream_key
from penstock.types import Reduction

from .report import Result, collect, digests


def run_unsplit(
    layers: Layers,
    batch: tuple[Any, Any],
    loss: LossFunction,
    reduction: Reduction | Callable[[Any], Any],
    pipe: Pipeline,
) -> Result:
    """Run the layers in order; seed the generators anew for each layer."""
    mesh = Mesh.of_one_process()
    computes = loss is layers.own_loss
    call = Call(pipe.num_microbatches, reduction, trains=True, computes_loss=computes)
    cut = Splitter(mesh, mesh.placement).cut(*batch, call)
    total: Tensor | None = None
    holders = [holder for _, holder in layers.holders()]
    parameters = [p for m in (*holders, *modules_of_loss(loss)) for p in m.parameters()]
    widen_gradients(parameters, pipe.plan.gradient_dtype)
    norms = batch_norms([*(step.module for step in layers), *modules_of_loss(loss)])
    statistics = _Statistics(norms)
    gpus = sorted({device.index for device in pipe.devices if device.type == "cuda"})
    # 1. The step, micro-batch after micro-batch: losses add up in the pipeline's order.
    with digests(layers) as seen, torch.random.fork_rng(gpus), kept_outside():
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
    # 2. The outputs in evaluation mode.
    modules = [module for holder in holders for module in holder.modules()]
    with (
        torch.random.fork_rng(gpus),
        kept_outside(),
        torch.no_grad(),
        in_evaluation(modules),
    ):
        seed = pipe.seed
        parts = [_run_seeded(layers, x, seed, "eval", i) for i, x in enumerate(cut.inputs)]
        outputs = gather(parts, cut.sizes, cut.output_weights)
    return collect(layers, loss, total, outputs, seen)


def _run_backward(value: Tensor, weight: float) -> None:
    with torch.autocast(value.device.type, enabled=False):
        torch.autograd.backward(value, torch.full_like(value, weight))


def _run_seeded(layers: Layers, inputs: Any, seed: int, phase: str, microbatch: int) -> Any:
    def seeded(step: Step, function: Callable[[], Any]) -> Any:
        _seed(stream_key(seed, phase, 0, step.index, microbatch))
        return function()

    with StreamBetween(stream_key(seed, phase, 0, BETWEEN, microbatch)) as stream:
        return layers.run(inputs, partial(stream.run_layer, seeded))


def _seed(key: int) -> None:
    torch.manual_seed(key)
    seed_outside(key)


@dataclass(slots=True)
class _Norm:
    """Statistics before the step; (values per channel, mean, unbiased variance) by call."""

    mean: Tensor
    variance: Tensor
    num_batches: Tensor | None
    calls: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)

    def put(self, norm: Any) -> None:
        """Set a layer's statistics to those after one update with the whole mini-batch."""
        # Pool the calls: mean of means, and squares within and between calls.
        count = sum(n for n, _, _ in self.calls)
        mean = torch.zeros_like(self.mean, dtype=torch.float64)
        for n, of_call, _ in self.calls:
            mean += n * of_call.double()
        mean /= count
        squares = torch.zeros_like(mean)
        for n, of_call, variance in self.calls:
            squares += (n - 1) * variance.double() + n * (of_call.double() - mean) ** 2
        # Move the statistics as torch does, once.
        share = norm.momentum
        if self.num_batches is not None:
            norm.num_batches_tracked.copy_(self.num_batches + 1)
            share = 1.0 / int(norm.num_batches_tracked) if share is None else share
        norm.running_mean.copy_((1 - share) * self.mean.double() + share * mean)
        norm.running_var.copy_(self.variance)
        if count > 1:
            variance = squares / (count - 1)
            norm.running_var.copy_((1 - share) * self.variance.double() + share * variance)


class _Statistics:
    """The expected statistics of BatchNorm layers that move once per mini-batch."""

    def __init__(self, norms: Sequence[nn.Module]) -> None:
        self._norms: dict[nn.Module, _Norm] = {}
        for norm in norms:
            buffers = {n: b.clone() for n, b in norm.named_buffers(recurse=False)}
            self._norms[norm] = _Norm(
                buffers["running_mean"],
                buffers["running_var"],
                buffers.get("num_batches_tracked"),
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            norm.register_forward_pre_hook(self._note, with_kwargs=True) for norm in self._norms
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, norm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not norm.training:
            return
        x = (args[0] if args else kwargs["input"]).detach()
        before = self._norms[norm]
        mean, variance = torch.zeros_like(before.mean), torch.zeros_like(before.variance)
        with torch.no_grad():  # momentum 1: the statistics of this call alone
            F.batch_norm(x, mean, variance, norm.weight, norm.bias, True, 1.0, norm.eps)
        before.calls.append((x.numel() // x.shape[1], mean, variance))

    def put(self) -> None:
        with torch.no_grad():
            for norm, before in self._norms.items():
                if before.calls:
                    before.put(norm)
