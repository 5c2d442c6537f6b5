"""The results of each side of a check, and the report: one row per tensor, and a verdict."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.model.layers import Layers
from penstock.model.owned import LOSS, modules_of_loss
from penstock.model.pytree import flatten
from penstock.runtime.microbatches import LossFunction


@dataclass(frozen=True, slots=True)
class Result:
    """The named tensors of one side, and digests of each layer's outputs, one per micro-batch."""

    tensors: dict[tuple[str, str], Tensor | None]
    layer_outputs: tuple[frozenset[bytes], ...]


@contextmanager
def digests(layers: Layers) -> Iterator[list[set[bytes]]]:
    """Record a digest of each layer's output, at every call inside."""
    outputs: list[set[bytes]] = [set() for _ in layers]

    def hook(index: int) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            digest = hashlib.blake2b(digest_size=16)
            for leaf in flatten(output)[0]:
                flat = leaf.detach().cpu().contiguous().view(-1)
                digest.update(flat.view(torch.uint8).numpy().tobytes())
            outputs[index].add(digest.digest())

        return record

    handles = [
        step.module.register_forward_hook(hook(step.index))
        for step in layers
        if not isinstance(step.module, torch.jit.ScriptModule)  # these take no hooks
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def collect(
    layers: Layers,
    loss: LossFunction,
    total: Tensor | None,
    outputs: Any,
    layer_outputs: list[set[bytes]],
) -> Result:
    """Return one side's results after a step: loss, gradients, buffers, outputs."""
    tensors: dict[tuple[str, str], Tensor | None] = {("loss", "loss"): total}
    for prefix, module in [*layers.holders(), *((f"{LOSS}.", m) for m in modules_of_loss(loss))]:
        for name, parameter in module.named_parameters():
            if not parameter.is_meta:  # another process has it
                tensors["gradient", f"{prefix}{name}"] = parameter.grad
        for name, buffer in module.named_buffers():
            if not buffer.is_meta:
                tensors["buffer", f"{prefix}{name}"] = buffer
    for n, leaf in enumerate(flatten(outputs)[0]):
        tensors["output", f"output {n}"] = leaf
    return Result(tensors, tuple(map(frozenset, layer_outputs)))


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One compared tensor: `kind` is loss, gradient, buffer or output.

    Of `elements`, `differing` differ in at least one bit, by at most `max_difference`.  `scale` is
    the largest absolute value of the unsplit model's tensor.
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
    """The result of `check`; it prints as a table and a verdict."""

    rows: tuple[CheckRow, ...]
    first_difference: str | None
    likely_causes: tuple[str, ...]
    setting: str

    @property
    def equal(self) -> bool:
        """True if every bit of every compared tensor is equal."""
        return all(row.equal for row in self.rows)

    @property
    def most(self) -> float:
        """The largest difference, as a share of the largest number of its kind of tensor."""
        largest: dict[str, float] = {}
        for row in self.rows:
            largest[row.kind] = max(row.scale, largest.get(row.kind, 0.0))
        return max(row.max_difference / (largest[row.kind] or 1.0) for row in self.rows)

    @property
    def verdict(self) -> str:
        """A line: equal or not, and the place of the first difference."""
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
