"""Is the pipeline the unsplit model?  Losses, gradients, buffers and outputs, bit by bit."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.model.capture.capture import resolve_layers
from penstock.model.layer_list import Layer
from penstock.model.layers import Layers
from penstock.model.pytree import tree_map
from penstock.pipeline import Pipeline
from penstock.runtime.microbatches import LossFunction
from penstock.torch_private import version_counter
from penstock.types import Reduction

from .compare import compare, together
from .report import CheckReport, Result, collect, digests
from .unsplit import run_unsplit


def check(
    layers: "nn.Module | Sequence[nn.Module | Layer] | Layers",
    inputs: Any,
    targets: Any = None,
    *,
    loss: LossFunction | None = None,
    num_microbatches: int = 1,
    **options: Any,
) -> CheckReport:
    """Train one step as a pipeline and as the unsplit model, and compare everything that comes
    out.

    The unsplit model runs here, in one thread, micro-batch after micro-batch; the model given is
    not changed (both sides are copies of it).  Compared: the loss, every parameter's gradient,
    every buffer, and the outputs in evaluation mode after the step.

    Args:
        layers, loss, num_microbatches: as for `Pipeline`; any module is captured with `inputs` as
            its example.
        inputs, targets: one batch, as for `Pipeline.train_step`.
        options: `num_stages` or `partition`, and any other argument of `Pipeline`.  In a `mesh` of
            processes all of them call this alike: each compares what it holds, slices put
            together, and has the report of all.  Operators that shards divide add up in another
            order: `report.most` says how far off that is.

    Returns:
        The report; `report.equal` is true if no bit differs.

    Raises:
        ConfigError: the stages are on several devices, the mesh has replicas, or the loss holds on
            to the model given.
    """
    given = resolve_layers(layers, inputs)
    loss = loss or given.own_loss
    if loss is None:
        raise ConfigError("check needs a loss, as train_step does: give loss=")
    unsplit, loss_of_model = copy.deepcopy((given, loss))
    twin, loss_of_twin = copy.deepcopy((given, loss))
    _check_copied(twin)
    if options.get("sharding") is not None:
        options.setdefault("example_inputs", inputs)  # operators are recorded with them
    with (
        Pipeline(twin, num_microbatches=num_microbatches, loss=loss_of_twin, **options) as pipe,
        _untouched(given),
    ):
        _check_one_device(pipe)
        _check_one_replica(pipe)
        for _, holder in unsplit.holders():
            holder.to(pipe.devices[0])
        batch = tree_map(lambda t: _leaf_on(t, pipe.devices[0]), (inputs, targets))
        threads = torch.get_num_threads()
        torch.set_num_threads(pipe.threads_per_stage)
        try:
            reduction = options.get("reduction", Reduction.MEAN)
            expected = run_unsplit(unsplit, batch, loss_of_model, reduction, pipe)
        finally:
            torch.set_num_threads(threads)
        batch = tree_map(lambda t: _leaf_on(t, pipe.devices[0]), (inputs, targets))
        found = _run_pipeline(pipe, twin, loss_of_twin, batch)
        setting = f"K={pipe.num_stages}, M={num_microbatches}"
        if pipe.sharding is not None:
            setting += f", sharding={pipe.plan.sharding}"
        own = compare(unsplit, expected, found, setting)
        everyone = pipe.mesh.world.gather(own, "for what the others compared")
        return together(everyone, expected)


def _check_copied(twin: Layers) -> None:
    """Refuse a model that deepcopy does not copy: torch.jit's copies lead back to it."""
    if not all(p.is_leaf for _, holder in twin.holders() for p in holder.parameters()):
        raise ConfigError(
            "copy.deepcopy of the model gives parameters that are no leaves, so that its two "
            "sides cannot be compared; scripted and traced modules do so. Check the model before "
            "it is scripted"
        )


def _check_one_device(pipe: Pipeline) -> None:
    if len(set(pipe.devices)) > 1:
        names = ", ".join(sorted(set(map(str, pipe.devices))))
        raise ConfigError(
            f"the stages are on several devices ({names}), the unsplit model on one; check with "
            "devices= naming one of them (stages may share a device)"
        )


def _check_one_replica(pipe: Pipeline) -> None:
    if pipe.mesh.num_replicas > 1:
        raise ConfigError(
            f"the mesh has {pipe.mesh.num_replicas} replicas, each with samples of its own, and "
            "the unsplit model sees those of one; check with num_replicas=1"
        )


def _leaf_on(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the batch, so that nothing of the caller's changes."""
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


@contextmanager
def _untouched(layers: Layers) -> Iterator[None]:
    """See that nothing inside reaches the caller's own model: only its copies run.

    Raises:
        ConfigError: a loss computed gradients of its parameters.
    """
    before = {p: p.grad for _, holder in layers.holders() for p in holder.parameters()}
    counts = {p: 0 if grad is None else version_counter(grad) for p, grad in before.items()}
    yield
    for parameter, grad in before.items():
        now = parameter.grad
        if now is not grad or (now is not None and version_counter(now) != counts[parameter]):
            raise ConfigError(
                f"the loss computed a gradient of a parameter of shape {tuple(parameter.shape)} "
                "of the model that was given, while copies of the model were checked: it holds on "
                "to that model (a closure). Make the loss a function of output and target only; "
                "for a penalty on weights, use the optimizer's weight_decay. The gradients of the "
                "given model are not what they were: zero them"
            )


def _run_pipeline(
    pipe: Pipeline, layers: Layers, loss: LossFunction, batch: tuple[Any, Any]
) -> Result:
    inputs, targets = batch
    looks = digests(layers) if pipe.sharding is None else nullcontext(None)  # else of slices
    with looks as seen:
        total = pipe.train_step(inputs, targets)
    found = collect(layers, loss, total, pipe.eval_step(inputs), seen or [set() for _ in layers])
    gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    whole = {id(gradients[n]): x for n, x in pipe.shards.whole(gradients).items()}
    return replace(found, tensors={key: whole.get(id(x), x) for key, x in found.tensors.items()})
