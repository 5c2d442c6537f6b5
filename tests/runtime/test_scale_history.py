"""Modules with float8 scales from earlier micro-batches are named in one warning."""

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import StatisticsWarning


class Buffered(nn.Linear):
    """Keeps a history as a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("fp8_amax_history_x", torch.zeros(16))


class Engine(nn.Linear):
    """Has what TransformerEngine's modules have."""

    def __init__(self, **meta: Any) -> None:
        super().__init__(4, 4)
        self.fp8_meta = {"fp8_checkpoint": False, **meta}


class Delayed:
    """A recipe with a history."""

    amax_history_len = 1024


def pipeline_of(*layers: nn.Module) -> penstock.Pipeline:
    return penstock.Pipeline(nn.Sequential(*layers, nn.Linear(4, 4)), 2, num_microbatches=2)


def test_one_warning_names_all_kinds_of_modules_with_a_history() -> None:
    layers = (Buffered(), nn.Sequential(Engine(recipe=Delayed())), Buffered())
    words = r"scales of Buffered, Engine may .*Float8Linear"
    with pytest.warns(StatisticsWarning, match=words) as warned:
        pipeline_of(*layers)
    assert len(warned) == 1


@pytest.mark.parametrize("engine", (Engine(), Engine(recipe=Delayed())))
def test_a_recipe_that_is_delayed_or_not_known_yet_is_warned_of(engine: nn.Module) -> None:
    with pytest.warns(StatisticsWarning, match="Engine"):
        pipeline_of(engine)


def test_scales_of_the_tensor_at_hand_are_no_reason_to_warn() -> None:
    pipeline_of(Engine(recipe=object()), nn.Linear(4, 4))  # a warning is an error here
