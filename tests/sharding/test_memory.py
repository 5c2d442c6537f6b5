"""What a device holds and sends is what a plan says, counted in bytes."""

import gc
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from benchmarks.sharding.memory import PLANS, at_rest, saved
from penstock import Mesh
from penstock.costs.count import record_graph
from penstock.model.layer_list import as_layers
from penstock.planner.placement import Placement
from penstock.sharding.at_rest import keep_slices
from penstock.sharding.convert import _moved as MOVED
from penstock.sharding.costs import Costs
from penstock.sharding.divided import DividedLayer
from penstock.sharding.layouts import Move
from penstock.sharding.plan import sent_bytes
from penstock.sharding.stages import plan_sharding
from tests.distributed.call import call
from tests.sharding.cases import gpt_block
from tests.sharding.fuzz import random_plan

NUM_SHARDS = 2


def held(mesh: Mesh) -> tuple[tuple[int, int], dict[str, tuple[int, int]]]:
    return at_rest(mesh), saved(mesh)


def test_each_shard_holds_its_share_and_saves_what_its_plan_counts(tmp_path: Path) -> None:
    for (own, whole), by_plan in call(held, Placement.of(range(1), num_shards=2), tmp_path):
        assert own * NUM_SHARDS == whole
        assert by_plan.keys() == set(PLANS)
        for saves, counted in by_plan.values():
            assert saves == pytest.approx(counted, rel=0.1)


def gathered(mesh: Mesh, plan: str) -> tuple[int, int, int]:
    """Return how many weights of a block are cut, how many of them its backward gathers again, and
    how many are whole anywhere in memory after a forward without a gradient.
    """
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


def test_no_weight_stays_whole_after_a_layer_and_only_gathered_ones_come_again(
    tmp_path: Path,
) -> None:
    placement = Placement.of(range(1), num_shards=NUM_SHARDS)
    for cut, again, alive in call(gathered, placement, tmp_path, plan="zero3"):
        assert cut
        assert again
        assert not alive
    for cut, again, alive in call(gathered, placement, tmp_path, plan="megatron"):
        assert cut
        assert not again  # used as they are held
        assert not alive


def sent(mesh: Mesh, seeds: list[int]) -> list[tuple[int, int]]:
    """Count what random plans of a block send; return it with what they say."""
    block, axes = gpt_block().double(), mesh.shard_axes
    whole = torch.randn(4, 8, 8, dtype=torch.float64, requires_grad=True)
    graph = record_graph(as_layers([block]), whole)
    found = []
    for seed in seeds:
        plan, counted = random_plan(graph, [axis.size for axis in axes], seed), [0.0]
        module = deepcopy(block)
        divided = DividedLayer(0, module, plan, axes)
        keep_slices(divided.cut)

        def moved(tensor: Tensor, how: Any, counted: list[float] = counted) -> Tensor:
            result = MOVED(tensor, how)
            held = max(tensor.nbytes, result.nbytes)
            held *= how.axis.size if how.move is Move.ALL_TO_ALL else 1
            counted[0] += sent_bytes(how.move, held, how.axis.size)
            return result

        with patch("penstock.sharding.convert._moved", moved):
            divided.call(partial(module, whole), {}).sum().backward()
        found.append((round(counted[0]), plan.forward_bytes + plan.backward_bytes))
    return found


@pytest.mark.parametrize("mesh", [(2,), (2, 2)], ids=str)
def test_each_shard_sends_what_its_plan_counts(mesh: tuple[int, ...], tmp_path: Path) -> None:
    """No conversion that was priced is left out, and no other one is made."""
    placement = Placement.of(range(1), num_shards=mesh)
    for found in call(sent, placement, tmp_path, seeds=list(range(6))):
        assert all(planned for _, planned in found)
        assert all(counted == planned for counted, planned in found), found
