"""A pipeline whose stages deal out experts trains as the unsplit model does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Mesh, Pipeline
from penstock.planner.placement import Placement
from penstock.zoo import gshard_moe
from tests.distributed.call import call
from tests.sharding.test_pipeline import WORDS, piped, two_steps

NUM_EXPERTS = 3
"""One device has two, the other one."""


def made() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_layers": 2, "width": 16, "num_heads": 4, "num_words": 32}
    sizes |= {"num_experts": NUM_EXPERTS, "capacity_factor": 0.7, "max_length": 8}
    return gshard_moe(**sizes, dropout=0.1).double()


def loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, balance = output
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.1 * balance


def trained(**options: Any) -> tuple[Pipeline, dict[str, Any]]:
    pipe = piped(made(), loss=loss, **options)
    return pipe, two_steps(pipe, WORDS)


def in_shards(mesh: Mesh) -> dict[str, Any]:
    pipe, found = trained(mesh=mesh, sharding="expert")
    own = {name: len(p) for name, p in pipe.named_parameters() if ".experts." in name}
    return found | {"experts": own}


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_dealt_out_experts_train_as_the_unsplit_model(num_stages: int, tmp_path: Path) -> None:
    placement = Placement.of(range(num_stages), num_shards=2)
    _, wanted = trained(partition=[5])
    dealt: list[int] = []
    for found in call(in_shards, placement, tmp_path):
        torch.testing.assert_close(found["losses"], wanted["losses"], rtol=0, atol=1e-12)
        torch.testing.assert_close(found["output"], wanted["output"], rtol=0, atol=1e-12)
        assert found["gradients"]
        own = {name: wanted["gradients"][name] for name in found["gradients"]}
        torch.testing.assert_close(found["gradients"], own, rtol=0, atol=1e-12)
        dealt += {*found["experts"].values()}
    assert sorted(dealt) == [1, 2]
