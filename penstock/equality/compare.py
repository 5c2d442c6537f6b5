"""Compare both sides tensor by tensor, and find the first difference."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from penstock.model.layers import Layers

from .report import CheckReport, CheckRow, Result

_ROUNDING = 1e-4
"""Relative difference up to which rounding is the likely cause."""


def compare(layers: Layers, expected: Result, actual: Result, setting: str) -> CheckReport:
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


def merge(reports: Sequence[CheckReport], expected: Result) -> CheckReport:
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
