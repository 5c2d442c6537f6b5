"""Asynchronous schedules give the same bits in processes as in one, tied weights included."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError
from penstock.schedules.names import ASYNCHRONOUS_SCHEDULES
from tests.distributed.call import call
from tests.side_by_side import same_bits

NUM_STAGES, PARTITION = 2, [2, 1]


class Tied(nn.Module):
    """A model whose first layer's weight is its last layer's too, with dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.middle = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.middle(self.drop(self.norm(self.first(x)))).relu()
        found: Tensor = nn.functional.linear(hidden, self.first.weight)
        return found


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(6, 4, generator=generator), torch.randn(6, 6, generator=generator))
        for _ in range(5)
    ]


def train(number: int, **options: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    """Train in two windows; give the losses, and what is left of weights and optimizer."""
    torch.manual_seed(0)
    model = Tied()
    pipe = penstock.Pipeline(
        penstock.capture(model, example_inputs=batches()[0][0]),
        num_microbatches=2,
        schedule=ASYNCHRONOUS_SCHEDULES[number],
        loss=nn.MSELoss(),
        threads_per_stage=1,
        **options,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    windows = (batches()[:3], batches()[3:])
    parts = [pipe.train_steps(window, optimizer) for window in windows]
    names: dict[Tensor, str] = {p: name for name, p in pipe.named_parameters()}
    state = {
        f"{names[p]}.{key}": value
        for p, values in optimizer.state.items()
        for key, value in values.items()
    }
    weights = {name: t for name, t in pipe.state_dict().items() if not t.is_meta}
    return torch.cat(parts), weights, state


def work(mesh: penstock.Mesh) -> list[Any]:
    """Train with every asynchronous schedule."""
    numbers = range(len(ASYNCHRONOUS_SCHEDULES))
    return [train(number, mesh=mesh, partition=PARTITION) for number in numbers]


def test_windows_have_the_same_bits_in_processes_as_in_one(tmp_path: Path) -> None:
    by_rank = call(work, (NUM_STAGES, 1), tmp_path)
    for number in range(len(ASYNCHRONOUS_SCHEDULES)):
        here = penstock.Transport.LOOPBACK
        losses, weights, state = train(number, partition=PARTITION, transport=here)
        found = [of_rank[number] for of_rank in by_rank]
        assert all(same_bits(of_rank[0], losses) for of_rank in found)
        for wanted, place in ((weights, 1), (state, 2)):
            together = {k: v for of_rank in found for k, v in of_rank[place].items()}
            assert together.keys() == wanted.keys()
            assert all(same_bits(together[k], wanted[k]) for k in wanted)


def refused(mesh: penstock.Mesh) -> list[str]:
    """Say what is refused of replicas, and of processes that give different numbers of batches."""
    pipe = penstock.Pipeline(
        [nn.Linear(4, 4), nn.Linear(4, 6)],
        mesh=mesh,
        num_microbatches=2,
        schedule=penstock.schedules.pipedream_2bw,
        loss=nn.MSELoss(),
    )
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    said = []
    for count in (2, 2 + mesh.rank):
        with pytest.raises(ConfigError) as caught:
            pipe.train_steps(batches()[:count], optimizer)
        said.append(str(caught.value))
    return said


def test_replicas_are_refused_on_every_process(tmp_path: Path) -> None:
    for said in call(refused, (1, 2), tmp_path):
        assert "wait for the gradients of all 2 replicas" in said[0]
        assert "number of batches" in said[1]
