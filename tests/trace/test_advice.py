"""Advice names the largest cost of a step, and is silent about a good step."""

from dataclasses import replace

import pytest

from penstock.schedules import gpipe, one_f_one_b
from penstock.schedules.passes import add_recompute
from penstock.simulator import Costs, simulate
from penstock.trace.advice import advice
from penstock.trace.timeline import MemorySample, Timeline

COSTS = Costs(forward_s=0.01, backward_s=0.02, recompute_s=0.01, transfer_s=0.0)
GOOD = simulate(one_f_one_b(2, 32), COSTS)
RECOMPUTED = simulate(add_recompute(one_f_one_b(2, 32)), COSTS)


def texts(timeline: Timeline, **facts: object) -> list[str]:
    return [found.text for found in advice(timeline, **facts)]  # type: ignore[arg-type]


def test_a_good_step_gets_none() -> None:
    assert texts(GOOD) == []
    assert texts(Timeline(())) == []


def test_a_slow_stage_should_give_a_layer_away() -> None:
    costs = replace(COSTS, forward_s=(0.01, 0.025), backward_s=(0.02, 0.05))
    assert texts(simulate(one_f_one_b(2, 32), costs)) == [
        "Stage 1 takes 1.43 times the mean: move a layer to another stage."
    ]


def test_a_large_bubble_needs_more_microbatches() -> None:
    (text,) = texts(simulate(gpipe(4, 4), COSTS))
    assert text == "The bubble is 42.9% of the step with 4 micro-batches: use more of them."


def test_slow_messages_are_named() -> None:
    found = texts(simulate(one_f_one_b(2, 32), replace(COSTS, transfer_s=0.02)))
    assert found[0].startswith("Messages between stages take ")


def test_recomputes_are_named_unless_memory_is_full() -> None:
    assert texts(RECOMPUTED) == [
        'Recomputes take 12.4% of the step: if memory allows, set recompute = "never".'
    ]
    traced = replace(RECOMPUTED, memory=(MemorySample(0, 0.1, 4 << 20),))
    assert "memory is free (4 MiB of 16 MiB)" in texts(traced, limits_bytes=(16 << 20,) * 2)[0]
    assert texts(traced, limits_bytes=(5 << 20,) * 2) == []


@pytest.mark.parametrize(
    ("rest", "head"), [("optimizer_s", "The optimizer takes "), ("set_up_s", "Set-up takes ")]
)
def test_time_outside_of_the_timeline_is_named(rest: str, head: str) -> None:
    (text,) = texts(GOOD, **{rest: GOOD.step_s / 4})
    assert text.startswith(f"{head}20.0% of the step")
    assert texts(GOOD, **{rest: GOOD.step_s / 20}) == []


def test_the_most_costly_problem_comes_first() -> None:
    found = advice(simulate(gpipe(4, 4), COSTS), optimizer_s=0.05)
    costs = [one.cost for one in found]
    assert len(costs) == 2 and costs == sorted(costs, reverse=True)
