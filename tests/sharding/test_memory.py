"""What a device holds and sends is what a plan says, counted in bytes."""

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
from penstock.sharding.divided import DividedLayer
from penstock.sharding.layouts import Move
from penstock.sharding.plan import sent_bytes
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
