"""Models of many families trained in shards beside themselves on one device."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import penstock
from penstock import Mesh, Pipeline
from penstock.errors import PenstockError
from penstock.model.layers import Layers
from penstock.model.pytree import flatten
from penstock.runtime.pipeline_module import parts_of
from penstock.sharding.named import READY
from tests.model.capture.any_models.lists import EVERY
from tests.model.capture.any_models.made import DECODER, IMAGES, TEXT
from tests.pretrained import same_kernels

FAMILIES = {
    "gpt2": "learned positions",
    "opt": "learned positions counted by a mask",
    "llama": "rotary positions",
    "mistral": "rotary positions, sliding window",
    "qwen3": "rotary positions, norms of heads",
    "gemma2": "sliding windows by turns",
    "phi3": "rotary positions, weights in one",
    "falcon": "rotary positions, one key for all heads",
    "bloom": "biases by distance",
    "mixtral": "experts",
    "bert": "encoder",
    "roberta": "encoder, positions from words",
    "distilbert": "encoder",
    "t5": "encoder and decoder, relative positions",
    "bart": "encoder and decoder",
    "whisper": "sound, encoder and decoder",
    "mamba": "state space",
    "lfm2": "convolutions and attention by turns",
    "vit": "vision",
    "swin": "vision, shifted windows",
    "clip": "vision and language",
    "llava": "vision and language, an image among the words",
}
"""Families by name, and what each is there for."""
PLANS = (*(name for name in READY if name == "context" or "context" not in name), "zero1")


@dataclass(frozen=True)
class Cell:
    """A family, a ready plan, samples of a micro-batch, and whether the batch has padding."""

    family: str
    plan: str
    samples: int
    padded: bool


def cells(families: Sequence[str], plans: Sequence[str], samples: Sequence[int]) -> Iterator[Cell]:
    """Yield all cells, those of one batch of one family together."""
    for family, number, padded in product(families, samples, (False, True)):
        if padded and "attention_mask" not in batch_of(family, 2, padded=False)[1]:
            continue
        for plan in plans:
            yield Cell(family, plan, number, padded)


def batch_of(family: str, count: int, *, padded: bool) -> tuple[nn.Module, Any]:
    """Return a model, always of the same weights, and a batch; if `padded`, with a mask."""
    found = next(each for each in EVERY if each.name == family)
    with ExitStack() as few:
        for sizes in (TEXT, DECODER, IMAGES):
            few.enter_context(patch.dict(sizes, num_hidden_layers=2))
        model, inputs_of = found.make()
    same_kernels(family, model)
    model = model.double()
    for weight in model.parameters():  # some are left as they are
        if not weight.isfinite().all():
            nn.init.normal_(weight, std=0.2)
    inputs = inputs_of(count)
    if not isinstance(inputs, dict):
        return model, inputs
    inputs = {
        n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for n, x in inputs.items()
    }
    if padded:
        mask = inputs["attention_mask"]
        lengths = 3 + torch.arange(count) % (mask.shape[1] - 2)
        inputs["attention_mask"] = (torch.arange(mask.shape[1]) < lengths[:, None]).long()
    return model, inputs


def loss(output: Any, targets: Tensor) -> Tensor:
    """Weigh all numbers that a model gives."""
    leaves = [leaf for leaf in flatten(output)[0] if leaf.is_floating_point() and leaf.dim()]
    logits = max(leaves, key=Tensor.numel)
    return (logits.flatten(1).cos() * targets[:, None]).mean()


def captured(cell: Cell) -> tuple[Layers, Any]:
    """Capture a model, and give a batch of two micro-batches."""
    model, inputs = batch_of(cell.family, 2 * cell.samples, padded=cell.padded)
    return penstock.capture(model, inputs), inputs


def trained(layers: Layers, inputs: Any, cell: Cell, mesh: Mesh | None) -> dict[str, Tensor]:
    """Train a step in shards, or without a mesh on one device: the loss, all gradients, and what
    the model gives in evaluation.
    """
    count = 2 * cell.samples
    targets = torch.arange(1.0, count + 1, dtype=torch.float64)
    how: dict[str, Any] = {"loss": loss, "example_inputs": inputs, "seed": 3}
    how["num_microbatches"] = 2
    how |= {"num_stages": 1} if mesh is None else {"mesh": mesh, "sharding": cell.plan}
    pipe = Pipeline(deepcopy(layers), **how)
    found = {"loss": pipe.train_step(inputs, targets)}
    gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    if mesh is not None:
        gradients = parts_of(pipe).shards.whole(gradients)
    found.update(gradients)
    output = flatten(pipe.eval_step(inputs))[0]
    given = [t for t in output if t.is_floating_point() and t.dim()]
    found["output"] = max(given, key=Tensor.numel)
    return {name: value.detach().clone() for name, value in found.items()}


def furthest(wanted: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """Return how far the worst tensor is off, beside the largest number of its kind."""
    if wanted.keys() != got.keys():
        return float("inf")
    own = [v for n, v in wanted.items() if n not in ("loss", "output")]
    largest = max(float(v.abs().max()) for v in own)
    worst = 0.0
    for name, value in wanted.items():
        beside = float(value.abs().max()) if name in ("loss", "output") else largest
        if got[name].shape != value.shape:
            return float("inf")
        off = float((got[name] - value).abs().max()) / beside
        worst = max(worst, off if off == off else float("inf"))
    return worst


def ran(mesh: Mesh, which: list[list[Any]]) -> list[tuple[float, str]]:
    """Run cells; return how far each is off, or what is said.

    Some models compute norms and positions in float32, whatever they are given: here in float64.
    """
    doubled = patch.object(Tensor, "float", Tensor.double)
    with patch.object(torch, "float32", torch.float64), doubled:
        return [*_ran(mesh, which)]


def _ran(mesh: Mesh, which: list[list[Any]]) -> Iterator[tuple[float, str]]:
    known: dict[Cell, Any] = {}
    for cell in (Cell(*each) for each in which):
        alone = Cell(cell.family, "", cell.samples, cell.padded)
        try:
            if alone not in known:
                known.clear()
                layers, inputs = captured(alone)
                known[alone] = layers, inputs, trained(layers, inputs, alone, None)
            layers, inputs, wanted = known[alone]
            got = trained(layers, inputs, cell, mesh)
            yield furthest(wanted, got), ""
        except PenstockError as error:
            yield float("nan"), f"{type(error).__name__}: {error}"
