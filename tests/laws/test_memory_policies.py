"""What forwards keep is moved away, or dropped and made again layer by layer: the same bits."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.schedules import Family, gpipe, one_f_one_b
from penstock.types import Recompute, Transport
from tests.every_schedule import EVERY_SCHEDULE, divided
from tests.models import ALL_MODELS, Model
from tests.side_by_side import assert_trains_like_unsplit

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


@pytest.mark.parametrize("policy", (offload, layers_again), ids=lambda policy: policy.__name__)
@pytest.mark.parametrize("model", ALL_MODELS, ids=repr)
@pytest.mark.parametrize("way", range(2))
def test_training_equals_the_unsplit_model_in_every_bit(
    model: Model, way: int, policy: Callable[[Model, int], dict[str, Any]]
) -> None:
    number = 2 * ALL_MODELS.index(model) + way
    assert_trains_like_unsplit(
        model,
        8 * model.min_samples + number % 2,
        bf16=number % 3 == 0,
        num_stages=3,
        num_microbatches=4,
        **policy(model, number),
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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("schedule", EVERY_SCHEDULE, ids=str)
def test_in_every_schedule(schedule: Family, policy: str) -> None:
    model = next(m for m in ALL_MODELS if m.name == "transformer")
    assert_trains_like_unsplit(
        model,
        6,
        steps=2,
        num_microbatches=6,
        schedule=schedule,
        **POLICIES[policy],
    )
