"""What a device holds and sends is what a plan says, counted in bytes."""

import gc
import time
import weakref
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import penstock
from benchmarks.sharding.memory import PLANS, at_rest, saved
from penstock import Mesh
from penstock.costs.cluster import Cluster
from penstock.costs.counting.count import record_graph
from penstock.model.layer_list import as_layers
from penstock.planner.mesh_costs import MeshPrices
from penstock.planner.placement import Placement
from penstock.planner.submeshes import Submesh
from penstock.runtime.replicas import Replicas
from penstock.runtime.shards.at_rest import keep_slices
from penstock.runtime.shards.convert import _moved as MOVED
from penstock.runtime.shards.divided import DividedLayer
from penstock.runtime.shards.run import ShardedTensor
from penstock.sharding.costs import USUAL_CLUSTER, Costs
from penstock.sharding.layouts import Move
from penstock.sharding.plan import sent_bytes
from penstock.sharding.stages import plan_sharding
from penstock.torch_private import storage_id
from penstock_recipes.zoo import gpt
from tests.distributed.call import call
from tests.mesh_tasks import mesh_task, on_mesh
from tests.sharding.cases import gpt_block
from tests.sharding.fuzz import random_plan

NUM_SHARDS = 2
FINISH = Replicas.finish


def held(mesh: Mesh) -> tuple[tuple[int, int], dict[str, tuple[int, int]]]:
    return at_rest(mesh), saved(mesh)


@pytest.mark.slow
def test_each_shard_holds_its_share_and_saves_what_its_plan_counts(tmp_path: Path) -> None:
    for (own, whole), by_plan in call(held, Placement.of(range(1), num_shards=2), tmp_path):
        assert own * NUM_SHARDS == whole
        assert by_plan.keys() == set(PLANS)
        for saves, counted in by_plan.values():
            assert saves == pytest.approx(counted, rel=0.1)


def gathered(mesh: Mesh, plans: tuple[str, ...]) -> list[tuple[int, int, int]]:
    return [_gathered(mesh, plan) for plan in plans]


def _gathered(mesh: Mesh, plan: str) -> tuple[int, int, int]:
    """Return how many weights of a block are cut, how many of them its backward gathers again, and
    how many are whole anywhere in memory after a forward without a gradient.
    """
    gc.collect()  # what the plan before has left
    module, whole = gpt_block(), torch.randn(4, 8, 8)
    graph = record_graph(as_layers([module]), whole.clone().requires_grad_())
    own = plan_sharding(plan, graph, ["0"], Costs.usual((NUM_SHARDS,))).layers[0]
    divided = DividedLayer(0, module, own, mesh.shard_axes)
    keep_slices(divided.cut)
    shapes = {cut.shape for cut in divided.cut.values()}
    with torch.no_grad():
        divided.call(partial(module, whole), {})
    alive = [x for x in gc.get_objects() if type(x) is Tensor and x.device.type == "cpu"]
    return len(divided.cut), len(own.again), sum(tuple(x.shape) in shapes for x in alive)


@pytest.mark.slow
def test_no_weight_stays_whole_after_a_layer_and_only_gathered_ones_come_again(tmp_path) -> None:
    placement = Placement.of(range(1), num_shards=NUM_SHARDS)
    gathers = {"zero3": True, "megatron": False}  # where they are used as they are held
    for found in call(gathered, placement, tmp_path, plans=tuple(gathers)):
        for (cut, again, alive), comes_again in zip(found, gathers.values(), strict=True):
            assert cut
            assert bool(again) == comes_again
            assert not alive


def replaced(mesh: Mesh) -> list[bool]:
    """Replace a layer's weights twice, and tell of the first new ones whether they are alive."""
    module, whole = gpt_block(), torch.randn(4, 8, 8)
    graph = record_graph(as_layers([module]), whole.clone().requires_grad_())
    own = plan_sharding("data", graph, ["0"], Costs.usual((NUM_SHARDS,))).layers[0]
    divided, once = DividedLayer(0, module, own, mesh.shard_axes), list[Any]()
    for _ in range(2):
        once.append([])
        for part in module.modules():
            for name, parameter in [*part.named_parameters(recurse=False)]:
                setattr(part, name, nn.Parameter(parameter.detach().clone()))
                once[-1].append(weakref.ref(getattr(part, name)))
        del parameter
        with torch.no_grad():
            divided.call(partial(module, whole), {})
    gc.collect()
    return [ref() is not None for ref in once[0]]


def sent(mesh: Mesh, seeds: list[int]) -> list[tuple[int, int]]:
    """Count what random plans of a block send; return it with what they say."""
    block, axes = gpt_block().double(), mesh.shard_axes
    whole = torch.randn(4, 8, 8, dtype=torch.float64, requires_grad=True)
    graph = record_graph(as_layers([block]), whole)
    found = []
    for seed in seeds:
        plan, counted = random_plan(graph, tuple(axis.size for axis in axes), seed), [0.0]
        module = deepcopy(block)
        divided = DividedLayer(0, module, plan, axes)
        keep_slices(divided.cut)

        def moved(tensor: Tensor, move: Move, step: Any, counted: Any = counted) -> Tensor:
            result, count = MOVED(tensor, move, step), step[0].size
            held = max(tensor.nbytes, result.nbytes)
            held *= count if move is Move.ALL_TO_ALL else 1
            counted[0] += sent_bytes(move, held, count)
            return result

        with patch("penstock.runtime.shards.convert._moved", moved):
            divided.call(partial(module, whole), {}).sum().backward()
        found.append((round(counted[0]), plan.forward_bytes + plan.backward_bytes))
    return found


def replaced_and_sent(mesh: Mesh, seeds: list[int]) -> tuple[list[bool], list[tuple[int, int]]]:
    return replaced(mesh), sent(mesh, seeds)


def test_a_weight_that_is_replaced_is_let_go_and_each_shard_sends_what_its_plan_counts(
    tmp_path: Path,
) -> None:
    placement = Placement.of(range(1), num_shards=NUM_SHARDS)
    by_rank = call(replaced_and_sent, placement, tmp_path, seeds=list(range(6)))
    for alive, _ in by_rank:
        assert len(alive) > 1 and not any(alive)
    check_sent([counted for _, counted in by_rank])


@pytest.mark.slow
def test_each_shard_of_a_grid_sends_what_its_plan_counts(tmp_path: Path) -> None:
    placement = Placement.of(range(1), num_shards=(2, 2))
    check_sent(call(sent, placement, tmp_path, seeds=list(range(6))))


def check_sent(by_rank: list[list[tuple[int, int]]]) -> None:
    """See that no conversion that was priced is left out, and no other one is made."""
    for found in by_rank:
        assert all(planned for _, planned in found)
        assert all(counted == planned for counted, planned in found), found


BATCH, LENGTH, M = 4, 16, 2
KEPT = ("data", "zero1", "zero2", "zero3", "megatron+zero1")
"""Ready plans that keep other things of weights in a step."""


def model_and_words() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_layers": 2, "width": 32, "num_heads": 4, "num_words": 64}
    return gpt(**sizes, max_length=LENGTH, tied=False), torch.zeros(
        BATCH, LENGTH, dtype=torch.long
    )


def kept_in_step(mesh: Mesh) -> dict[str, int]:
    """Count weights, gradients and AdamW's state on this device at the end of a second step,
    before it lets go of what it has gathered.
    """
    return {name: _kept(mesh, name) for name in KEPT}


def _kept(mesh: Mesh, name: str) -> int:
    model, words = model_and_words()
    own = {id(weight) for weight in model.parameters()}
    others = {id(x): x for x in _tensors() if id(x) not in own}  # alive, so that ids stay theirs
    how: dict[str, Any] = {"num_microbatches": M, "example_inputs": words[: BATCH // M]}
    pipe = penstock.Pipeline(model, loss=_loss, mesh=mesh, sharding=name, **how)
    optimizer = torch.optim.AdamW(pipe.parameters())
    found = list[int]()

    def counted(replicas: Replicas) -> None:
        FINISH(replicas)
        time.sleep(0.1)  # gloo's threads need Python's lock to let go of what they sent
        alive = [x for x in _tensors() if id(x) not in others]
        alive += [p.grad for p in pipe.parameters() if p.grad is not None]
        floats = [x for x in alive if x.is_floating_point() and x.dim() and not x.is_meta]
        sizes = {storage_id(x): x.untyped_storage().nbytes() for x in floats}
        found.append(sum(sizes.values()))

    for _ in range(2):
        with patch.object(Replicas, "finish", counted):
            pipe.train_step(words, words)
        optimizer.step()
        optimizer.zero_grad()
    return found[-1]


def _tensors() -> list[Tensor]:
    gc.collect()  # what stands for a whole tensor has no memory of its own
    every = (x for x in gc.get_objects() if issubclass(type(x), Tensor))
    return [x for x in every if not isinstance(x, ShardedTensor)]


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


@pytest.mark.slow
def test_the_price_of_a_mesh_counts_what_a_device_keeps_in_a_step(tmp_path: Path) -> None:
    """The price of ZeRO-1, -2 and -3 says what is whole in a step, and what is in slices."""
    placement = Placement.of(range(1), num_shards=2)
    task = mesh_task(*model_and_words(), Cluster.load(USUAL_CLUSTER), M)
    given = task.graph_of(M), task.names, task.model.spans, task.cluster, M
    priced = {}
    for name in KEPT:
        found = on_mesh(MeshPrices(*given, name), 0, len(task.names), Submesh(0, 1, 2))
        priced[name] = found.state_bytes
    assert priced["data"] > priced["zero1"] > priced["zero2"] > priced["zero3"]
    for counted in call(kept_in_step, placement, tmp_path):
        assert counted == priced
