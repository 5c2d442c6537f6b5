"""A GPT is trained on shards of its layers: gradients are those of the unsplit model."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock import Mesh, capture
from penstock.costs.count import record_graph
from penstock.planner.placement import Placement
from penstock.sharding.divided import DividedLayer
from penstock.sharding.named import plan_sharding
from penstock.zoo import gpt
from tests.distributed.call import call


def model_and_words() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = gpt(num_layers=4, width=16, num_heads=4, num_words=32, max_length=8, dropout=0.0)
    return model.double(), torch.randint(0, 32, (3, 8))


def run_layers(mesh: Mesh) -> Any:
    """Run each layer divided, one after the other; return the output and all gradients whole."""
    model, words = model_and_words()
    layers = capture(model, words)
    graph = record_graph(layers, words)
    plan = plan_sharding(
        "megatron", graph, [s.path for s in layers.steps], mesh.shards.tensors.size
    )
    value: Any = words
    divided = [
        DividedLayer(step.module, own, mesh.shards.tensors)
        for step, own in zip(layers, plan.layers, strict=True)
    ]
    for layer in divided:
        layer.cut_weights()
    for step, layer in zip(layers, divided, strict=True):
        value = layer.call(step.module, (value,), {})
    value.square().sum().backward()
    gradients = {
        f"{step.path}.{name}": gradient
        for step, layer in zip(layers, divided, strict=True)
        for name, gradient in layer.whole_gradients().items()
    }
    return value.detach(), gradients


def test_layers_in_shards_are_those_of_the_unsplit_model(tmp_path: Path) -> None:
    placement = Placement.of(range(1), num_shards=2)
    model, words = model_and_words()
    output = model(words)
    output.square().sum().backward()
    for found, gradients in call(run_layers, placement, tmp_path):
        assert torch.allclose(found, output, rtol=0, atol=1e-12)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(gradients[name], parameter.grad, rtol=0, atol=1e-12), name
