"""Stages balanced by what their layers take."""

from dataclasses import replace

import pytest

from penstock.planner.balance import balanced
from penstock.planner.plan import BalancedBy
from penstock.schedules import gpipe, one_f_one_b
from penstock.schedules.family import Family
from penstock.types import Recompute
from tests.planner.plans import plan

SPANS = [(n, n + 1) for n in range(14)]


@pytest.mark.parametrize(
    "schedule, recompute, partition",
    [
        (gpipe, (Recompute.STAGE, Recompute.STAGE), (7, 7)),
        (one_f_one_b, (Recompute.STAGE, Recompute.STAGE), (6, 8)),
        (one_f_one_b, (Recompute.NEVER, Recompute.NEVER), (7, 7)),
        (gpipe, (Recompute.STAGE, Recompute.NEVER), (6, 8)),
    ],
)
def test_a_stage_that_recomputes_less_gets_more_layers(
    schedule: Family, recompute: tuple[Recompute, ...], partition: tuple[int, int]
) -> None:
    """In 1F1B the last stage's backwards follow at once: 6 (2 + 2) = 8 (1 + 2)."""
    before = replace(plan(1, 13, schedule=schedule), recompute=recompute)
    assert balanced(before, [(1.0, 2.0)] * 14, SPANS).partition == partition


def test_layers_cost_their_recompute_on_whichever_stage_they_come_to_be() -> None:
    every_layer = (Recompute.layers(*range(13)),) * 2
    before = replace(plan(13, 1, schedule=gpipe), recompute=every_layer)
    assert balanced(before, [(1.0, 2.0)] * 14, SPANS).partition == (7, 7)


def test_a_plan_that_is_balanced_says_what_each_stage_takes() -> None:
    found = balanced(plan(4, 2, schedule=gpipe), [(1.0, 2.0)] * 6, SPANS[:6])
    assert (found.partition, found.balanced_by) == ((3, 3), BalancedBy.TIME)
    assert found.predicted_s == (12.0, 12.0)
    assert "slowest stage 12 s a micro-batch, 1.00 times the mean" in str(found)
