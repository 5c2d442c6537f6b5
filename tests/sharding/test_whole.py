"""Between the layers of a sharded stage the model's own code sees whole values."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Mesh, Pipeline
from penstock.planner.placement import Placement
from penstock.runtime.pipeline_module import parts_of
from scripts.sharding_table import LIMIT, PAGE, cells_of, read, run, written
from tests.distributed.call import call
from tests.sharding.families import FAMILIES, PLANS, Cell

SAMPLES = (2, 4, 3)
QUICK = [("sequence", 3), ("zero3", 2)]
FEW = [("data", 4), *QUICK]
EVERY = [*product(("data", "zero1", "zero3", "sequence", "grid", "auto"), SAMPLES)]
SEEN: list[Any] = []
_SLOW = pytest.mark.slow


class Turns(nn.Linear):
    """Takes another path in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found if self.training else found.cos() + 1


class Looks(nn.Module):
    """Asks between its layers whatever can be asked of a value, and goes by some of it.

    Where it does not train it works on values that it only looks at in training.
    """

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.head = Turns(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.widen(x)
        for block in self.blocks:
            asked = (tuple(h.shape), h.size(1), h.numel(), h.dim(), h.stride(), h.nbytes)
            also = (len(h), h.is_contiguous(), h.is_meta, h.type(), h.requires_grad)
            note((*asked, *also, h.is_leaf))
            places = torch.arange(h.shape[1], dtype=h.dtype)[:, None] / h.shape[0]
            if not self.training:
                h = h - h.mean(0, keepdim=True)
                h = h + torch.stack([own.cos() for own in h.transpose(0, 1)], 1)
            h = block(h) * (h.numel() / 400) + places + places.new_ones(h.shape[0], 1, h.size(-1))
            h = self.blocks[0](self.blocks[1](h))
        return self.head(h)


def note(seen: Any) -> None:
    SEEN.append(seen)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return (output * targets).cos().mean()


def trained(mesh: Mesh | None, sharding: str = "", samples: int = 2) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Looks().double()
    inputs = torch.randn(2 * samples, 6, 8, dtype=torch.float64)
    how: dict[str, Any] = {"num_stages": 1} if mesh is None else {"mesh": mesh}
    how |= {} if mesh is None else {"sharding": sharding}
    layers = penstock.capture(model, inputs, keep=["blocks.1"])
    pipe = Pipeline(layers, loss=loss, example_inputs=inputs, num_microbatches=2, **how)
    targets = torch.randn(2 * samples, 6, 4, dtype=torch.float64)
    SEEN.clear()
    found: dict[str, Any] = {"loss": pipe.train_step(inputs, targets), "seen": SEEN[-6:]}
    gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    found |= gradients if mesh is None else parts_of(pipe).shards.whole(gradients)
    output, kept = pipe.eval_step(inputs)
    return found | {"output": output} | dict(kept)


def in_shards(mesh: Mesh, every: list[tuple[str, int]]) -> list[Any]:
    return [trained(mesh, *each) for each in every]


@pytest.mark.parametrize(
    ("placement", "every"),
    [
        pytest.param(Placement.of(range(1), num_shards=2), QUICK, id="2 shards"),
        *(
            pytest.param(Placement.of(range(k), num_shards=shards), every, id=name, marks=_SLOW)
            for name, k, shards, every in (
                ("2 shards, each plan", 1, 2, EVERY),
                ("2 stages of 2 shards", 2, 2, FEW),
                ("2 x 2 shards", 1, (2, 2), EVERY),
            )
        ),
    ],
)
def test_code_between_layers_sees_and_makes_what_it_does_in_the_unsplit_model(
    placement: Placement, every: list[tuple[str, int]], tmp_path: Path
) -> None:
    wanted = {samples: trained(None, samples=samples) for _, samples in every}
    for of_rank in call(in_shards, placement, tmp_path, every=every, timeout_s=300.0):
        for how, found in zip(every, of_rank, strict=True):
            own = wanted[how[1]]
            tensors = {name: own[name] for name in found if name != "seen"}
            for name, value in tensors.items():
                assert torch.allclose(found[name], value, rtol=1e-12, atol=1e-12), (how, name)
            if len(found["seen"]) == len(own["seen"]):  # one stage looks at all
                upto = None if placement.num_stages == 1 else -1  # from another stage comes a leaf
                assert [seen[:upto] for seen in found["seen"]] == [
                    seen[:upto] for seen in own["seen"]
                ], how


def test_the_table_of_the_docs_is_as_the_script_writes_it() -> None:
    page = PAGE.read_text()
    assert written(page, read(page)) == page, "run: python -m scripts.sharding_table 2"


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_models_train_under_every_plan_as_the_docs_say(family, mesh) -> None:
    said, name = read(PAGE.read_text()), "x".join(map(str, mesh))
    runs = [plan for plan in PLANS if {name, f"{name}*"} & {*said[family, plan]}]
    cells = [*cells_of(family, mesh, runs)]
    for cell, (off, _) in zip(cells, run(cells, mesh) if cells else (), strict=True):
        assert off <= LIMIT, cell


@pytest.mark.slow
def test_rotary_positions_and_padding_masks_are_those_of_all_samples() -> None:
    """Each was silently wrong, or could not run, where a slice was seen."""
    cells = [
        Cell("llama", "sequence", 3, padded=False),
        Cell("llama", "data", 4, padded=True),
        Cell("mistral", "zero3", 2, padded=True),
    ]
    for cell, (off, _) in zip(cells, run(cells, (2,)), strict=True):
        assert off <= LIMIT, cell
