"""A pipeline whose stages deal out experts trains as the unsplit model does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.alpa_paper.gshard import gshard_moe
from penstock import Mesh
from penstock.planner.placement import Placement
from tests.distributed.call import call
from tests.sharding.test_pipeline import WORDS, piped, two_steps


def loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, balance = output
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.1 * balance


def trained(mesh: Mesh | None = None, **how: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_layers": 2, "width": 16, "num_heads": 4, "num_words": 32}
    model = gshard_moe(**sizes, num_experts=3, capacity_factor=0.7, max_length=8).double()
    pipe = piped(model, loss=loss, mesh=mesh, **how)
    experts = {len(p) for name, p in pipe.named_parameters() if ".experts." in name}
    return two_steps(pipe, WORDS) | {"experts": experts}


@pytest.mark.slow
def test_dealt_out_experts_train_as_the_unsplit_model(tmp_path: Path) -> None:
    wanted = trained(partition=[5])
    every = call(trained, Placement.of(range(1), num_shards=2), tmp_path, sharding="expert")
    assert [found["experts"] for found in every] == [{2}, {1}]
    for found in every:
        for what in ("losses", "gradients", "output"):
            torch.testing.assert_close(found[what], wanted[what], rtol=0, atol=1e-12)
