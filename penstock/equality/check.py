"""Compare a pipeline with the unsplit model, bit by bit: loss, gradients, buffers, outputs."""

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
from penstock.runtime.pipeline_module import parts_of
from penstock.torch_private import version_counter
from penstock.types import Reduction

from .report import CheckReport, CheckRow, Result, collect, digests
from .unsplit import run_unsplit

_ROUNDING = 1e-4
"""Relative difference up to which rounding is the likely cause."""


def check(
    layers: "nn.Module | Sequence[nn.Module | Layer] | Layers",
    inputs: Any,
    targets: Any = None,
    *,
    loss: LossFunction | None = None,
    num_microbatches: int | None = None,
    **options: Any,
) -> CheckReport:
    """Train one step as a pipeline and as the unsplit model, and compare all results.

    The unsplit model runs here, in one thread, micro-batch after micro-batch.  Both sides are
    copies, so the model given is not changed.  The report compares the loss, every parameter's
    gradient, every buffer, and the outputs in evaluation mode after the step.

    Args:
        layers: as for `Pipeline`; any module is captured with `inputs` as its example.
        inputs: those of one batch, as for `Pipeline.train_step`.
        targets: likewise.
        loss: as for `Pipeline`.
        num_microbatches: M.
        options: `num_stages` or `partition`, and any other argument of `Pipeline`.  In a `mesh` of
            processes all of them call this alike.  Each compares its own tensors, with slices put
            together, and returns the report of all.  Operators in shards add up in another order:
            `report.most` is the relative difference.

    Returns:
        The report; `report.equal` is true if no bit differs.

    Raises:
        ConfigError: the stages are on several devices, the mesh has replicas, or the loss holds on
            to the model given.
    """
    original = resolve_layers(layers, inputs)
    loss = loss or original.own_loss
    if loss is None:
        raise ConfigError("check needs a loss, as train_step does: give loss=")
    # 1. Copy the model twice, so that the caller's stays as it is.
    unsplit, loss_of_model = copy.deepcopy((original, loss))
    twin, loss_of_twin = copy.deepcopy((original, loss))
    if not all(p.is_leaf for _, holder in twin.holders() for p in holder.parameters()):
        raise ConfigError(
            "copy.deepcopy of the model gives parameters that are no leaves, so that its two "
            "sides cannot be compared; scripted and traced modules do so. Check the model before "
            "it is scripted"
        )
    if options.get("sharding") is not None:
        options.setdefault("example_inputs", inputs)  # operators are recorded with them
    with (
        Pipeline(twin, num_microbatches=num_microbatches, loss=loss_of_twin, **options) as pipe,
        _untouched(original),
    ):
        _check_place(pipe)
        # 2. Run the unsplit model, with the threads of a stage: kernels add in the same order.
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
        # 3. Run the pipeline, and compare.
        actual = _run_pipeline(pipe, twin, loss_of_twin, batch)
        setting = f"K={pipe.num_stages}, M={pipe.num_microbatches}"
        if pipe.sharding is not None:
            setting += f", sharding={pipe.plan.sharding}"
        report = _compare(unsplit, expected, actual, setting)
        reports = pipe.mesh.world.gather(report, "for what the others compared")
        return _merge(reports, expected)


def _check_place(pipe: Pipeline) -> None:
    """Raise ConfigError for several devices or replicas, which the unsplit model does not have."""
    if len(set(pipe.devices)) > 1:
        names = ", ".join(sorted(set(map(str, pipe.devices))))
        raise ConfigError(
            f"the stages are on several devices ({names}), the unsplit model on one; check with "
            "devices= naming one of them (stages may share a device)"
        )
    if pipe.mesh.num_replicas > 1:
        raise ConfigError(
            f"the mesh has {pipe.mesh.num_replicas} replicas, each with samples of its own, and "
            "the unsplit model sees those of one; check with num_replicas=1"
        )


def _leaf_on(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the batch, so that the caller's does not change."""
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


@contextmanager
def _untouched(layers: Layers) -> Iterator[None]:
    """Raise ConfigError if a loss computes gradients of the caller's own model inside."""
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
    """Run a step and an evaluation; return the results, with slices of gradients gathered."""
    inputs, targets = batch
    looks = digests(layers) if pipe.sharding is None else nullcontext(None)  # shards see slices
    with looks as outputs:
        total = pipe.train_step(inputs, targets)
    outputs = outputs or [set() for _ in layers]
    result = collect(layers, loss, total, pipe.eval_step(inputs), outputs)
    gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    whole = {id(gradients[n]): x for n, x in parts_of(pipe).shards.whole(gradients).items()}
    return replace(result, tensors={k: whole.get(id(x), x) for k, x in result.tensors.items()})


def _compare(layers: Layers, expected: Result, actual: Result, setting: str) -> CheckReport:
    """Compare the tensors of this process."""
    rows = tuple(
        _row(kind, name, expected.tensors[kind, name], actual.tensors[kind, name])
        for kind, name in expected.tensors
        if (kind, name) in actual.tensors
    )
    if all(row.equal for row in rows):
        return CheckReport(rows, None, (), setting)
    first, causes = _explain(layers, rows, expected, actual)
    return CheckReport(rows, first, causes, setting)


def _merge(reports: Sequence[CheckReport], expected: Result) -> CheckReport:
    """Merge the reports of all processes.

    Of a tensor in several reports the largest difference counts; one in no report differs.
    """
    rows: dict[tuple[str, str], CheckRow] = {}
    for row in (row for report in reports for row in report.rows):
        key = row.kind, row.name
        if key not in rows or rows[key].max_difference < row.max_difference:
            rows[key] = row
    merged = tuple(
        rows.get(key) or _row(*key, tensor, None)
        for key, tensor in expected.tensors.items()
        if key in rows or tensor is not None
    )
    worst = next((report for report in reports if not report.equal), reports[0])
    return replace(worst, rows=merged)


def _row(kind: str, name: str, a: Tensor | None, b: Tensor | None) -> CheckRow:
    """Compare one tensor of both sides; None is no tensor."""
    if a is None or b is None or a.shape != b.shape:
        elements = max(0 if t is None else t.numel() for t in (a, b))
        differing = 0 if a is None and b is None else max(elements, 1)
        difference = float("inf") if differing else 0.0
        return CheckRow(kind, name, elements, differing, difference, 0.0)
    x, y = (t.to_dense() if t.is_sparse else t for t in (a.detach().cpu(), b.detach().cpu()))
    differing = int((~_same_bits(x, y)).sum()) if x.numel() else 0
    difference = float((x.double() - y.double()).abs().max()) if differing else 0.0
    scale = float(x.double().abs().max()) if x.numel() else 0.0
    return CheckRow(kind, name, x.numel(), differing, difference, scale)


def _same_bits(x: Tensor, y: Tensor) -> Tensor:
    """Compare bit by bit: -0.0 is not 0.0, but all NaN are equal."""
    same = x == y
    if not x.is_floating_point():
        return same
    return (same & (x.signbit() == y.signbit())) | (x.isnan() & y.isnan())


def _explain(
    layers: Layers, rows: tuple[CheckRow, ...], expected: Result, actual: Result
) -> tuple[str, tuple[str, ...]]:
    """Return the layer with the first difference, and the usual causes."""
    # A wrong forward is seen first in the first layer whose output differs.
    for step in layers:
        outputs = actual.layer_outputs[step.index]  # empty if the layer runs elsewhere
        if outputs and not expected.layer_outputs[step.index] <= outputs:
            return f"the forward of layer {step.label}", (
                "the layer draws random numbers from a generator of its own (random.Random, "
                "numpy.random.default_rng, torch.Generator)",
                "the layer keeps state between calls outside its buffers, or reads a global",
                "a kernel of it is not deterministic, or chose another path for another thread "
                "count",
            )
    # A wrong backward is seen first in the last layer whose gradient differs.
    wrong = {row.name for row in rows if row.kind == "gradient" and not row.equal}
    for step in reversed(layers.steps):
        if any(f"{step.name}.{name}" in wrong for name, _ in step.module.named_parameters()):
            small = all(row.max_difference <= _ROUNDING * (row.scale or 1) for row in rows)
            return f"the backward of layer {step.label}", (
                "rounding only: a backward kernel adds in another order (indexing with several "
                "threads, say)"
                if small
                else "the layer's backward depends on state that changes between micro-batches",
            )
    return "buffers or outputs after the step", (
        "a buffer is updated by something else than the layer's forward (a hook, a backward, a "
        "callback)",
    )
