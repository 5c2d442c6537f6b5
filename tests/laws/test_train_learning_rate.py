"""The learning rate is a function of the step: up in a line, down in half a cosine."""

import io
import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from penstock_recipes.recipe.optimizer_sections import Cosine, Exponential
from penstock_recipes.train.command import Request, start_run
from penstock_recipes.train.interrupt import Interrupt
from penstock_recipes.train.learning_rate import learning_rate, warmup_cosine
from tests.digits import DIGITS, SMALL

PEAK = 0.3


def rates(warmup_steps: int, final_share: float = 0.0) -> list[float]:
    """Give the learning rates of 100 steps, and what the step after the last would have."""
    return [
        warmup_cosine(
            step, num_steps=100, warmup_steps=warmup_steps, peak=PEAK, final_share=final_share
        )
        for step in range(101)
    ]


@pytest.mark.parametrize("warmup_steps", [0, 1, 10, 99])
def test_it_reaches_the_peak_at_the_end_of_the_warm_up_and_only_falls_then(warmup_steps) -> None:
    rising, falling = rates(warmup_steps)[:warmup_steps], rates(warmup_steps)[warmup_steps:]
    assert falling[0] == PEAK and all(a > b for a, b in pairwise(falling))
    assert rising == pytest.approx([PEAK * (n + 1) / warmup_steps for n in range(warmup_steps)])


@pytest.mark.parametrize("final_share", [0.0, 0.1, 1.0])
def test_it_ends_at_its_final_share(final_share: float) -> None:
    assert rates(10, final_share)[-1] == pytest.approx(PEAK * final_share)


@pytest.mark.parametrize("section", [Cosine, partial(Exponential, name="exponential")])
@pytest.mark.parametrize("warmup_epochs", [2, 2.5, 7])
def test_a_warm_up_longer_than_the_run_is_shortened_to_it(section, warmup_epochs) -> None:
    found = [
        learning_rate(
            section(warmup_epochs=warmup_epochs), step, peak=PEAK, steps_per_epoch=5, epochs=2
        )
        for step in range(10)
    ]
    assert found == pytest.approx([PEAK * (n + 1) / 10 for n in range(10)])


def test_a_step_more_than_was_reckoned_with_has_a_learning_rate_too() -> None:
    """Epochs of parallel text differ in steps, so a run may have more than the first one says."""
    section = Cosine(warmup_epochs=2, final_share=0.5)
    assert learning_rate(section, 10, peak=PEAK, steps_per_epoch=5, epochs=2) == PEAK


def test_a_run_says_that_its_warm_up_is_shortened(tmp_path: Path) -> None:
    said, changes = io.StringIO(), [*SMALL, "train.epochs=1"]
    console = Console(file=said)
    assert start_run(Request(DIGITS, changes, tmp_path / "run"), console, Interrupt()).finished
    assert "warmup_epochs = 2 is not less than train.epochs = 1" in said.getvalue()


def test_halfway_down_the_cosine_is_half_the_peak() -> None:
    assert math.isclose(rates(0)[50], PEAK / 2)
