"""What a stage keeps at most is what the paper's formula says."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import penstock
from penstock.schedules import BackwardInput, Family, Schedule, gpipe, one_f_one_b
from penstock_recipes.zoo.resnet import residual_network
from tests.every_schedule import EVERY_SCHEDULE
from tests.memory_formula import cut, formula_bytes, most_kept


@pytest.mark.parametrize("stage", range(4))
def test_gpipe_keeps_m_micro_batches_and_1f1b_those_on_their_way(stage: int) -> None:
    def most_live(schedule: Schedule) -> float:
        return most_kept(schedule, stage, [1] * 8, kept=1, passing=0)

    assert most_live(gpipe(4, 8)) == 8 and most_live(one_f_one_b(4, 8)) == 4 - stage


def divides(family: Family) -> bool:
    """Tell whether a backward is in two parts: the formula knows of whole ones only."""
    made = chain.from_iterable(family(num_stages, 4).instructions for num_stages in (1, 2, 3))
    return any(isinstance(x, BackwardInput) for x in made)


@pytest.mark.parametrize("schedule", [f for f in EVERY_SCHEDULE if not divides(f)], ids=str)
@pytest.mark.parametrize("recompute", list(penstock.Recompute))
@pytest.mark.parametrize("partition", [[8], [3, 5], [2, 1, 5]])
def test_a_pipeline_keeps_what_the_formula_says(partition, recompute, schedule) -> None:
    torch.manual_seed(0)
    model = residual_network(1, 4)
    inputs, targets = torch.rand(24, 1, 8, 8), torch.randint(10, (24,))
    options: dict[str, Any] = {"loss": cross_entropy, "schedule": schedule, "recompute": recompute}
    with penstock.Pipeline(model, partition=partition, num_microbatches=4, **options) as pipe:
        pipe.train_step(inputs, targets)  # the first step looks for layers that change their input
        pipe.trace = penstock.Trace.MEMORY
        pipe.train_step(inputs, targets)
        assert pipe.last_timeline is not None
        measured = pipe.last_timeline.peak_bytes()
        expected = formula_bytes(
            list(cut(model, pipe.partition)),
            (inputs, targets),
            cross_entropy,
            pipe.schedule_for(),
            recompute,
        )
    assert measured == pytest.approx(expected, rel=0.01)


def test_the_formula_by_hand() -> None:
    """Stage 0 keeps 3 batches of 2 x 4 floats, and the Tanh's output of 2 x 5 floats."""
    stages = [nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Sequential(nn.Linear(5, 1))]
    inputs, targets = torch.randn(6, 4), torch.randn(6, 1)
    schedule, recompute = gpipe(2, 3), penstock.Recompute.STAGE
    found = formula_bytes(stages, (inputs, targets), nn.functional.mse_loss, schedule, recompute)
    assert found[0] == 3 * (2 * 4 * 4) + 2 * 5 * 4
    assert found[1] == 3 * (2 * 5 * 4 + 2 * 4) + 2 * 4  # mse_loss saves the Linear's output


def test_working_it_out_changes_nothing() -> None:
    model = residual_network(1, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batch = (torch.rand(6, 1, 8, 8), torch.randint(10, (6,)))
    generator = torch.random.get_rng_state()
    formula_bytes([model], batch, cross_entropy, gpipe(1, 4), penstock.Recompute.STAGE)
    assert torch.equal(generator, torch.random.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
