"""The learning rate is a function of the step: up in a line, down in half a cosine."""

import math
from itertools import pairwise

import pytest

from penstock.train.learning_rate import warmup_cosine

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
def test_it_reaches_the_peak_at_the_end_of_the_warm_up_and_only_falls_then(
    warmup_steps: int,
) -> None:
    rising, falling = rates(warmup_steps)[:warmup_steps], rates(warmup_steps)[warmup_steps:]
    assert falling[0] == PEAK and all(a > b for a, b in pairwise(falling))
    assert rising == pytest.approx([PEAK * (n + 1) / warmup_steps for n in range(warmup_steps)])


@pytest.mark.parametrize("final_share", [0.0, 0.1, 1.0])
def test_it_ends_at_its_final_share(final_share: float) -> None:
    assert rates(10, final_share)[-1] == pytest.approx(PEAK * final_share)


def test_halfway_down_the_cosine_is_half_the_peak() -> None:
    assert math.isclose(rates(0)[50], PEAK / 2)
