"""What a device holds of a model that is divided, counted in bytes of storages."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock import Mesh
from penstock.costs.counting.count import record_graph
from penstock.model.layer_list import as_layers
from penstock.runtime.shards.at_rest import keep_slices
from penstock.runtime.shards.divided import DividedLayer
from penstock.sharding.costs import Costs
from penstock.sharding.routed import routed_calls
from penstock.sharding.stages import plan_sharding
from penstock.torch_private import storage_id
from penstock_recipes.zoo import gpt

PLANS = ("megatron", "sequence", "data", "zero3")


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def at_rest(mesh: Mesh) -> tuple[int, int]:
    """Return the bytes of weights, gradients and optimizer state on this device under "zero3",
    and those of the whole model.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_layers": 2, "width": 32, "num_heads": 4, "num_words": 64}
    model = gpt(**sizes, max_length=16, tied=False)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    words = torch.zeros(4, 16, dtype=torch.long)
    pipe = penstock.Pipeline(
        model,
        num_microbatches=2,
        loss=_loss,
        example_inputs=words[:2],
        mesh=mesh,
        sharding="zero3",
    )
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.train_step(words, words)
    optimizer.step()
    weights = list(pipe.parameters())
    gradients = [p.grad for p in weights if p.grad is not None]
    states = [x for own in optimizer.state.values() for n, x in own.items() if n != "step"]
    return _bytes([*weights, *gradients, *states]), 4 * whole  # Adam keeps two


def _bytes(tensors: list[Tensor]) -> int:
    return sum({storage_id(t): t.untyped_storage().nbytes() for t in tensors}.values())


def saved(mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Return for each plan the bytes that a block saves for its backward on this device, weights
    left out, and those that the plan's prices count.
    """
    return {plan: _saved(mesh, plan) for plan in PLANS}


def _saved(mesh: Mesh, name: str) -> tuple[int, int]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_layers": 1, "width": 64, "num_heads": 4, "num_words": 2}
    block = gpt(**sizes, max_length=2, dropout=0.0).blocks[0]
    x = torch.randn(4, 32, 64, requires_grad=True)
    layers = as_layers([block])
    graph = record_graph(layers, x, torch_type="cpu")
    axes = mesh.shard_axes
    costs = Costs.usual([axis.size for axis in axes])
    plan = plan_sharding(name, graph, ["0"], costs).layers[0]
    divided = DividedLayer(0, block, plan, axes)
    keep_slices(divided.cut)
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = divided.call(partial(block, x), {})
    for weight in block.parameters():
        held.pop(storage_id(weight), None)
    del output
    return sum(held.values()), round(costs.activation_bytes(graph, routed_calls(graph, 0), plan))
