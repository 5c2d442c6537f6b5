"""What forwards keep is moved away, or dropped and made again layer by layer: the same bits."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from benchmarks.all_pairs import all_pairs
from penstock.schedules import (
    Family,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    zb_h1,
    zb_v,
)
from penstock.types import Recompute, Trace, Transport
from tests.every_schedule import divided
from tests.kept import open_files
from tests.models import ALL_MODELS, Model
from tests.side_by_side import assert_trains_like_unsplit, same_bits
from tests.ways import named_schedules, one_each

MOVED: tuple[dict[str, Any], ...] = (
    {"schedule": gpipe, "recompute": Recompute.NEVER, "transport": Transport.THREADS},
    {"schedule": one_f_one_b, "recompute": Recompute.STAGE, "transport": Transport.LOOPBACK},
    {"schedule": divided, "recompute": Recompute.NEVER, "transport": Transport.LOOPBACK},
    {"schedule": gpipe, "recompute": (Recompute.STAGE, Recompute.NEVER, Recompute.NEVER)},
)
MADE_AGAIN: tuple[dict[str, Any], ...] = (
    {"schedule": gpipe, "transport": Transport.THREADS},
    {"schedule": one_f_one_b, "transport": Transport.LOOPBACK, "offload": True},
    {"schedule": divided, "transport": Transport.LOOPBACK},
)


def offload(_: Model, number: int) -> dict[str, Any]:
    """Move away what whole stages keep."""
    return {"offload": True, **MOVED[number % len(MOVED)]}


def layers_again(model: Model, number: int) -> dict[str, Any]:
    """Let every second layer run twice, or all."""
    every = range(len(model.layers()))
    again = Recompute.layers(*every[number % 2 :: 2] if number % 5 else every)
    return {"recompute": again, **MADE_AGAIN[number % len(MADE_AGAIN)]}


@pytest.mark.parametrize("model, policy", one_each(ALL_MODELS, (offload, layers_again)))
def test_training_equals_the_unsplit_model_in_every_bit(model: Any, policy: Any) -> None:
    number = ALL_MODELS.index(model) // 2
    options: dict[str, Any] = {"bf16": number % 3 == 0, "num_stages": 3, "num_microbatches": 4}
    options["steps"] = 2
    assert_trains_like_unsplit(
        model, 8 * model.min_samples + number % 2, **policy(model, number), **options
    )


POLICIES: dict[str, dict[str, Any]] = {
    "offload": {"num_stages": 4, "recompute": Recompute.NEVER, "offload": True},
    "layers_again": {
        "partition": (1, 2, 1, 1),
        "recompute": (
            Recompute.STAGE,
            Recompute.layers(1, 2),
            Recompute.NEVER,
            Recompute.layers(4),
        ),
    },
}


@pytest.mark.parametrize("schedule, policy", one_each(named_schedules(), POLICIES))
def test_in_every_schedule(schedule: Family, policy: str) -> None:
    model = next(m for m in ALL_MODELS if m.name == "transformer")
    assert_trains_like_unsplit(
        model, 4, steps=2, num_microbatches=4, schedule=schedule, **POLICIES[policy]
    )


FAMILIES = (one_f_one_b, zb_h1(), zb_v(), interleaved_1f1b(2), pipedream(), pipedream_2bw)
RECOMPUTE = (
    Recompute.NEVER,
    Recompute.STAGE,
    Recompute.layers(0, 2, 5),
    (Recompute.layers(1), Recompute.NEVER, Recompute.STAGE, Recompute.NEVER),
)


@pytest.mark.parametrize(
    ("schedule", "recompute", "in_folder"), all_pairs([FAMILIES, RECOMPUTE, (False, True)])
)
def test_whatever_else_is_chosen_the_bits_stay_and_less_is_kept(
    schedule: Family, recompute: Any, in_folder: bool, tmp_path: Path
) -> None:
    folder = str(tmp_path) if in_folder else None
    before, seen = open_files(), set[str]()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.update(open_files() - before)
        return nn.functional.mse_loss(output, target)

    def trained(**options: Any) -> tuple[int, list[Tensor]]:
        torch.manual_seed(0)
        kinds = [nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2))]
        told: dict[str, Any] = {"partition": (2, 2, 2, 2), "num_microbatches": 6, "loss": loss}
        told |= {"schedule": schedule, "recompute": recompute, "transport": Transport.LOOPBACK}
        told |= {"trace": Trace.MEMORY, "threads_per_stage": 1}
        pipe = penstock.Pipeline(
            [copy.deepcopy(kind) for _ in range(4) for kind in kinds], **options, **told
        )
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(24, 16)
        losses = pipe.train_steps([(x, x)] * 2, optimizer)
        assert pipe.last_timeline is not None
        peaks = pipe.last_timeline.peak_bytes()
        return sum(peaks.values()), [losses, *(p.detach() for p in pipe.parameters())]

    kept, expected = trained()
    assert not seen
    less, found = trained(offload=True, offload_folder=folder)
    assert all(map(same_bits, found, expected))
    at_the_end = schedule == zb_v() and recompute is Recompute.STAGE  # what waits for weights
    assert less <= kept if at_the_end else less < kept
    assert seen and all(name.startswith(str(tmp_path)) == in_folder for name in seen)
