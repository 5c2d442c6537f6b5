"""Is the pipeline the unsplit model?  Losses, gradients, buffers and outputs, bit by bit."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.layers import MODEL_INPUT, Layer, Layers, Value, as_layers, call, join_output
from penstock.model.pytree import flatten
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

_ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One compared tensor: `kind` is loss, gradient, buffer or output.

    `differing` of its `elements` differ in at least one bit, by at most `max_difference`.
    """

    kind: str
    name: str
    elements: int
    differing: int
    max_difference: float
    scale: float

    @property
    def equal(self) -> bool:
        return self.differing == 0


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `check` found; printing it gives a table and a verdict."""

    rows: tuple[CheckRow, ...]
    first_difference: str | None
    likely_causes: tuple[str, ...]
    setting: str

    @property
    def equal(self) -> bool:
        """Whether every compared tensor is equal, to the bit."""
        return all(row.equal for row in self.rows)

    @property
    def verdict(self) -> str:
        """One line: equal or not, and where it starts."""
        differing = [row for row in self.rows if not row.equal]
        if not differing:
            return (
                f"EQUAL: all {len(self.rows)} tensors of {self.setting} are the unsplit model's; "
                "0 bits differ"
            )
        worst = max(differing, key=lambda row: row.max_difference)
        return (
            f"DIFFERENT: {len(differing)} of {len(self.rows)} tensors of {self.setting} differ "
            f"from the unsplit model's (most: {worst.kind} {worst.name!r} by "
            f"{worst.max_difference:.3g}); starts at {self.first_difference}"
        )

    def to_json(self) -> str:
        """Write the report as JSON."""
        data = asdict(self) | {"equal": self.equal, "verdict": self.verdict}
        return json.dumps(data)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = [
            f"{'kind':8}  {'name':{width}}  {'elements':>10}  {'differing':>9}  "
            f"{'max difference':>14}"
        ]
        for row in self.rows:
            lines.append(
                f"{row.kind:8}  {row.name:{width}}  {row.elements:>10,}  {row.differing:>9,}  "
                f"{row.max_difference:>14.3g}"
            )
        lines += [f"likely cause: {cause}" for cause in self.likely_causes]
        return "\n".join([*lines, self.verdict])


@dataclass(frozen=True, slots=True)
class _Result:
    """Named tensors of one side, and a digest of what each layer gave for each micro-batch."""

    tensors: dict[tuple[str, str], Tensor | None]
    layer_outputs: tuple[frozenset[bytes], ...]


def check(
    layers: "nn.Sequential | Sequence[nn.Module | Layer] | Layers",
    inputs: Any,
    targets: Any = None,
    *,
    loss: LossFunction,
    num_microbatches: int = 1,
    **options: Any,
) -> CheckReport:
    """Train one step as a pipeline and as the unsplit model, and compare everything that comes
    out.

    The unsplit model runs here, in one thread, micro-batch after micro-batch; the model given is
    not changed (both sides are copies of it).  Compared: the loss, every parameter's gradient,
    every buffer, and the outputs in evaluation mode after the step.

    Args:
        layers, loss, num_microbatches: as for `Pipeline`.
        inputs, targets: one batch, as for `Pipeline.train_step`.
        options: `num_stages` or `partition`, and any other argument of `Pipeline`.

    Returns:
        The report; `report.equal` is true if no bit differs.
    """
    model, twin = copy.deepcopy(layers), copy.deepcopy(layers)
    unsplit = as_layers(model)
    with Pipeline(twin, num_microbatches=num_microbatches, loss=loss, **options) as pipe:
        threads = torch.get_num_threads()
        torch.set_num_threads(pipe.threads_per_stage)
        try:
            reduction = options.get("reduction", Reduction.MEAN)
            expected = _run_unsplit(unsplit, (inputs, targets), loss, reduction, pipe)
        finally:
            torch.set_num_threads(threads)
        found = _run_pipeline(pipe, as_layers(twin), inputs, targets)
        return _compare(unsplit, expected, found, f"K={pipe.num_stages}, M={num_microbatches}")


def _run_unsplit(
    layers: Layers,
    batch: tuple[Any, Any],
    loss: LossFunction,
    reduction: Reduction | Callable[[Any], Any],
    pipe: Pipeline,
) -> _Result:
    """Run the layers in order, drawing from torch's own generator, seeded anew for each layer."""
    inputs, targets = batch
    sizes = microbatch_sizes(batch_size(inputs, "inputs"), pipe.num_microbatches)
    target_parts = split(targets, sizes)
    weights = loss_weights(reduction, target_parts, sizes)
    moments: MomentsByModule = {}
    total: Tensor | None = None
    modules = batch_norms(step.module for step in layers)
    with _digests(layers) as digests, torch.random.fork_rng(devices=[]):
        for i, part in enumerate(split(inputs, sizes)):
            with separate_statistics(modules, moments):
                output = _run_seeded(layers, part, pipe.seed, i)
                torch.default_generator.manual_seed(
                    stream_key(pipe.seed, "train", 0, len(layers), i)
                )
                value = loss(output, target_parts[i])
            if weights[i]:
                torch.autograd.backward(value, torch.full_like(value, weights[i]))
                weighted = value.detach() * weights[i]
                total = weighted if total is None else total + weighted
    commit_statistics(moments)
    return _collect(layers, total, _evaluate(layers, inputs, sizes), digests)


def _run_seeded(layers: Layers, inputs: Any, seed: int, microbatch: int) -> Any:
    values: dict[Value, Any] = {MODEL_INPUT: inputs}
    for step in layers:
        key = stream_key(seed, "train", 0, step.index, microbatch)
        torch.default_generator.manual_seed(key)
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


def _run_pipeline(pipe: Pipeline, layers: Layers, inputs: Any, targets: Any) -> _Result:
    with _digests(layers) as digests:
        total = pipe.train_step(inputs, targets)
    return _collect(layers, total, pipe.eval_step(inputs), digests)


@contextmanager
def _digests(layers: Layers) -> Iterator[list[set[bytes]]]:
    """Note a digest of what each layer gives, at every call inside."""
    found: list[set[bytes]] = [set() for _ in layers]

    def noting(index: int) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            digest = hashlib.blake2b(digest_size=16)
            for leaf in flatten(output)[0]:
                digest.update(
                    leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
            found[index].add(digest.digest())

        return note

    handles = [step.module.register_forward_hook(noting(step.index)) for step in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _collect(
    layers: Layers, total: Tensor | None, outputs: Any, digests: list[set[bytes]]
) -> _Result:
    tensors: dict[tuple[str, str], Tensor | None] = {("loss", "loss"): total}
    for step in layers:
        for name, parameter in step.module.named_parameters():
            tensors["gradient", f"{step.name}.{name}"] = parameter.grad
        for name, buffer in step.module.named_buffers():
            tensors["buffer", f"{step.name}.{name}"] = buffer
    for n, leaf in enumerate(flatten(outputs)[0]):
        tensors["output", f"output {n}"] = leaf
    return _Result(tensors, tuple(map(frozenset, digests)))


def _compare(layers: Layers, expected: _Result, found: _Result, setting: str) -> CheckReport:
    rows = tuple(
        _row(kind, name, expected.tensors[kind, name], found.tensors.get((kind, name)))
        for kind, name in expected.tensors
    )
    if all(row.equal for row in rows):
        return CheckReport(rows, None, (), setting)
    first, causes = _explain(layers, rows, expected, found)
    return CheckReport(rows, first, causes, setting)


def _row(kind: str, name: str, a: Tensor | None, b: Tensor | None) -> CheckRow:
    if a is None or b is None or a.shape != b.shape:
        elements = max(0 if t is None else t.numel() for t in (a, b))
        differing = 0 if a is None and b is None else max(elements, 1)
        difference = float("inf") if differing else 0.0
        return CheckRow(kind, name, elements, differing, difference, 0.0)
    x, y = a.detach().cpu(), b.detach().cpu()
    differing = int((~((x == y) | (x.isnan() & y.isnan()))).sum()) if x.numel() else 0
    difference = float((x.double() - y.double()).abs().max()) if differing else 0.0
    scale = float(x.double().abs().max()) if x.numel() else 0.0
    return CheckRow(kind, name, x.numel(), differing, difference, scale)


def _explain(
    layers: Layers, rows: tuple[CheckRow, ...], expected: _Result, found: _Result
) -> tuple[str, tuple[str, ...]]:
    """Name the layer where the difference starts, and what usually makes such a difference."""
    for step in layers:
        if not expected.layer_outputs[step.index] <= found.layer_outputs[step.index]:
            return f"the forward of layer {step.label}", (
                "the layer draws random numbers outside torch (random, numpy) or of its own "
                "Generator",
                "the layer keeps state between calls outside its buffers, or reads a global",
                "a kernel of it is not deterministic, or chose another path for another thread "
                "count",
            )
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
