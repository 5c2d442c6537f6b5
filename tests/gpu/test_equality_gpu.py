"""On a GPU: the same bits as the unsplit model there, several stages sharing one device."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Recompute, Trace, Transport
from penstock_recipes.zoo import gpt
from tests.every_schedule import EVERY_SCHEDULE
from tests.ways import IN_ONE_PROCESS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


OPTIONS: Any = {"num_microbatches": 4, "loss": nn.CrossEntropyLoss(), "devices": "cuda:0"}


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16, 5),
    )


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(14, 3, 16, 16, generator=generator)
    return x.cuda(), torch.randint(0, 5, (14,), generator=generator).cuda()


@pytest.mark.parametrize("transport", IN_ONE_PROCESS)
@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("schedule", EVERY_SCHEDULE)
@pytest.mark.parametrize("num_stages", (1, 2, 4))
def test_every_number_of_stages_gives_the_same_bits(
    num_stages: int, schedule: Any, recompute: Recompute, transport: Transport
) -> None:
    one, many = convolutions(), convolutions()
    plain: Any = {"recompute": Recompute.NEVER, "transport": Transport.LOOPBACK}
    how: Any = {"schedule": schedule, "recompute": recompute, "transport": transport}
    with (
        penstock.Pipeline(one, 1, **plain, **OPTIONS) as a,
        penstock.Pipeline(many, num_stages, **how, **OPTIONS) as b,
    ):
        for _ in range(3):
            assert torch.equal(a.train_step(*batch()), b.train_step(*batch()))
    for p, q in zip(one.parameters(), many.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)
    for a_buffer, b_buffer in zip(one.buffers(), many.buffers(), strict=True):
        assert torch.equal(a_buffer, b_buffer)


@pytest.mark.parametrize("num_stages", (1, 2, 4))
def test_check_says_equal_without_dropout(num_stages: int) -> None:
    layers = convolutions().cuda()
    layers[7] = nn.Identity()
    report = penstock.check(layers, *batch(), num_stages=num_stages, **OPTIONS)
    assert report.equal, report.verdict


def test_a_cut_gpt_is_checked_although_its_kernels_add_in_any_order() -> None:
    with torch.device("cuda:0"):
        model = gpt(num_layers=12, width=1024, num_heads=16, num_words=32_000, dropout=0.0)
        words = torch.randint(32_000, (2, 1024))
    found = str(penstock.capture(model, words))
    assert "checked: outputs and gradients" in found and "not checked" not in found


def test_the_module_form_does_not_hang() -> None:
    layers = convolutions()
    x, y = batch()
    with penstock.Pipeline(layers, 2, num_microbatches=4, devices="cuda:0") as pipe:
        nn.functional.cross_entropy(pipe(x), y).backward()
        pipe.eval_step(x)
    assert all(p.grad is not None for p in layers.parameters())


def test_a_traced_step_gives_the_devices_own_times() -> None:
    layers = copy.deepcopy(convolutions())
    with penstock.Pipeline(layers, 2, trace=Trace.TIME, **OPTIONS) as pipe:
        pipe.train_step(*batch())
        assert pipe.last_timeline is not None
        assert pipe.last_timeline.step_s > 0
