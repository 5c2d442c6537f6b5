"""What works in one process works on every rank: one that runs nothing, one where nothing trains,
and copies of the pipeline.
"""

import copy
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import penstock
from penstock import Pipeline
from penstock.planner.placement import Placement
from tests.side_by_side import same_bits

from .call import call

INPUTS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class Rotary(nn.Module):
    """Blocks, and a table of rotations between them that is a buffer; the head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.blocks[1].weight = self.blocks[0].weight
        self.turn: Tensor
        self.shift: Tensor
        self.register_buffer("turn", torch.rand(4), persistent=False)
        self.register_buffer("shift", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x * self.turn.cos()))
        shifted: Tensor = x + self.shift
        return shifted


def piped(captured: bool, mesh: penstock.Mesh | None, frozen: bool) -> Pipeline:
    torch.manual_seed(0)
    model = Rotary()
    model.first.requires_grad_(not frozen)
    of = chain()
    of[0].requires_grad_(not frozen)
    layers = penstock.capture(model, INPUTS[:2]) if captured else of
    where: dict[str, Any] = {"num_stages": 2} if mesh is None else {"mesh": mesh}
    return Pipeline(layers, loss=nn.MSELoss(), num_microbatches=2, partition=[1, 2], **where)


def chain() -> list[nn.Module]:
    return [nn.Linear(6, 4), nn.Sequential(nn.Tanh(), nn.BatchNorm1d(4)), nn.Linear(4, 4)]


def used(mesh: penstock.Mesh | None, runs: str) -> dict[str, Any]:
    """Use a pipeline in every way that a script does; return all that is seen."""
    found: dict[str, Any] = {}
    for captured, frozen in ((True, True), (False, False)):
        pipe = piped(captured, mesh, frozen)
        trained = [p for p in pipe.parameters() if p.requires_grad]  # none of it may be empty
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        averaged = AveragedModel(pipe, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        scaler = penstock.GradScaler(pipe, init_scale=1024.0)
        losses, norms = [], []
        for _ in range(2):
            losses.append(pipe.train_step(INPUTS, TARGETS, loss_scale=scaler.get_scale()))
            scaler.unscale_(optimizer)
            norms.append(penstock.clip_grad_norm_(pipe, 0.1))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            if [*pipe.named_parameters()]:  # torch averages nothing with an error
                averaged.update_parameters(pipe)
        assert {n for n, _ in pipe.named_parameters()} <= pipe.state_dict().keys()
        other, average = copy.deepcopy(pipe), cast(Pipeline, averaged.module)
        assert other.mesh is pipe.mesh or mesh is None
        path = Path(runs) / f"{captured}-{frozen}-{mesh is None}"
        penstock.save_checkpoint(path, pipe, optimizer)
        penstock.load_checkpoint(path, pipe, optimizer)
        found[f"{captured}, {frozen}"] = [
            *losses,
            *norms,
            pipe.eval_step(INPUTS),
            average.eval_step(INPUTS),
            pipe.train_step(INPUTS, TARGETS),
            other.train_step(INPUTS, TARGETS),  # as the first does, with weights of its own
            torch.tensor(scheduler.get_last_lr()),
        ]
        assert {n for n, _ in other.named_parameters()} == {n for n, _ in pipe.named_parameters()}
        assert not {*map(id, other.parameters())} & {*map(id, pipe.parameters())}
    return found


def test_each_rank_does_what_one_process_does(tmp_path: Path) -> None:
    wanted = used(None, str(tmp_path))
    placement = Placement((((1,),), ((2,),)), ("cpu", "cpu"), stage_places=(0, 1), idle=(0,))
    for found in call(used, placement, tmp_path, runs=str(tmp_path)):
        for way, values in wanted.items():
            pairs = zip(found[way], values, strict=True)
            assert [same_bits(a, b) for a, b in pairs] == [True] * len(values), way
