"""What is kept on a GPU may be moved, cast or saved: the same bits, or the same weights again."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import Recompute, Transport
from penstock.schedules import gpipe, one_f_one_b
from tests.gpu.models import Subject, gradients, language, products, unlike, unsplit
from tests.ways import IN_ONE_PROCESS, WHOLE_STAGES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ON_GPU = pytest.mark.parametrize("device", ["cuda:0"])
LARGE = 2048
"""Products of this width and copies of their results take long enough to meet."""


def piped(model: Any, subject: Subject, device: str, **options: Any) -> penstock.Pipeline:
    given = {"num_stages": 2, "num_microbatches": 4, "recompute": Recompute.NEVER}
    return penstock.Pipeline(
        model,
        **{**given, **options},
        loss=subject.loss,
        devices=device,
        example_inputs=subject.inputs,
    )


@ON_GPU
@pytest.mark.parametrize("transport", IN_ONE_PROCESS)
@pytest.mark.parametrize("recompute", WHOLE_STAGES)
@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_moving_to_the_host_and_back_changes_no_bit(
    device: str, schedule: Any, recompute: Recompute, transport: Transport, width: int = LARGE
) -> None:
    subject = products(device, width, 2 * width)
    model = copy.deepcopy(subject.model)
    how = {"schedule": schedule, "recompute": recompute, "transport": transport}
    _, wanted = unsplit(subject, 4)
    with piped(model, subject, device, offload=True, **how) as pipe:
        for _ in range(3):
            pipe.zero_grad()
            pipe.train_step(subject.inputs, subject.targets)
            assert unlike(gradients(model), wanted) == []


@ON_GPU
@pytest.mark.parametrize("recompute", WHOLE_STAGES)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_autocast_gives_the_bits_that_it_gives_the_unsplit_model(
    device: str, num_stages: int, recompute: Recompute
) -> None:
    subject = products(device)
    model = copy.deepcopy(subject.model)
    kind = torch.device(device).type
    with torch.autocast(kind, torch.bfloat16):
        _, wanted = unsplit(subject, 4)
    whole = unsplit(subject, 4)[1]
    with (
        piped(model, subject, device, num_stages=num_stages, recompute=recompute) as pipe,
        torch.autocast(kind, torch.bfloat16),
    ):
        pipe.train_step(subject.inputs, subject.targets)
    assert unlike(gradients(model), wanted) == []
    assert unlike(gradients(model), whole) != []  # it was cast


@ON_GPU
@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_language_model_in_stages_is_near_the_unsplit_one(device: str, num_stages: int) -> None:
    subject = language(device)
    model = copy.deepcopy(subject.model)
    loss, wanted = unsplit(subject, 4)
    with piped(model, subject, device, num_stages=num_stages) as pipe:
        found = pipe.train_step(subject.inputs, subject.targets)
    assert unlike({"": found}, {"": loss}, 1e-6) == []
    assert unlike(gradients(model), wanted, subject.tolerance) == []


@ON_GPU
def test_a_checkpoint_goes_from_the_gpu_to_the_cpu_and_back(device: str, tmp_path: Path) -> None:
    subject = products(device)
    first, other, last = (copy.deepcopy(subject.model) for _ in range(3))
    with piped(first, subject, device) as pipe:
        adam = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        pipe.train_step(subject.inputs, subject.targets)
        adam.step()
        penstock.save_checkpoint(tmp_path / "first", pipe, adam)
        state = states(first, adam)
    other.cpu()
    with piped(other, subject, "cpu", num_stages=3) as pipe:
        adam = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        penstock.load_checkpoint(tmp_path / "first", pipe, adam)
        assert {tensor.device.type for tensor in states(other, adam).values()} == {"cpu"}
        assert unlike(states(other, adam), state) == []
        pipe.train_step(subject.inputs.cpu(), subject.targets.cpu())
        adam.step()
        penstock.save_checkpoint(tmp_path / "other", pipe, adam)
        after = states(other, adam)
        assert unlike(after, state) != []
    with piped(last, subject, device, num_stages=1) as pipe:
        adam = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        penstock.load_checkpoint(tmp_path / "other", pipe, adam)
        assert unlike(states(last, adam), after) == []
        pipe.train_step(subject.inputs, subject.targets)
        adam.step()
    assert {p.device for p in last.parameters()} == {subject.inputs.device}


def states(model: torch.nn.Module, adam: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return copies of a model's weights with the moments that an optimizer has of them."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().clone()
        own = adam.state[p]
        found |= {f"{name} {key}": own[key].clone() for key in ("exp_avg", "exp_avg_sq")}
    return found
