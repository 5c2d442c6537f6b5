"""Models on the meta device, and pipelines of them, for tests of folders of weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.model.capture.captured import record_model
from penstock.model.capture.source import captured_layers
from penstock.model.layers import Layers
from penstock.planner.cuts import balance
from tests.model.capture.any_models.lists import REQUIRED
from tests.model.capture.any_models.made import Made

BATCH = 4


def build(name: str, *, device: str = "cpu") -> Made:
    """Build a model of `any_models`; the same one at every call, or on the meta device."""
    with torch.device(device):
        made: Made = next(model for model in REQUIRED if model.name == name).make()
    same_kernels(name, made[0])
    return made


def same_kernels(name: str, model: Any) -> None:
    """Let a model compute as on the meta device: other kernels may round differently."""
    if name == "mixtral":  # torch's grouped_mm knows bfloat16 only there
        model.set_experts_implementation("batched_mm")


def layers_of(made: Made) -> Layers:
    """Capture a model."""
    model, inputs_of = made
    return captured_layers(record_model(model, inputs_of(BATCH)))


def even_cut(layers: Layers, num_stages: int) -> list[int]:
    """Cut so that all stages have about as many parameters."""
    return list(balance(layers.parameter_counts(), num_stages))


def pipeline(made: Made, num_stages: int = 2, **options: Any) -> penstock.Pipeline:
    """Capture a model, and cut it."""
    given = {"num_stages": num_stages, "num_microbatches": 1, "threads_per_stage": 1, **options}
    return penstock.Pipeline(layers_of(made), **given)


def logits_of(output: Any) -> Tensor:
    """Give what a model says, without what it remembers."""
    if isinstance(output, Tensor):
        return output
    logits: Tensor = output["logits" if "logits" in output else "logits_per_image"]
    return logits


def whole_logits(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Run a whole model, in evaluation."""
    with torch.no_grad():
        return logits_of(model.eval()(**inputs))


def saved_by_transformers(name: str, folder: Path, **options: Any) -> nn.Module:
    """Save a model by the library that it comes from, and give it."""
    model: Any = build(name)[0]
    model.save_pretrained(folder, **options)
    whole: nn.Module = model
    return whole
