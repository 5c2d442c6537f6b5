"""The verifier: every way in which a schedule can be wrong is named, and the spot is marked."""

from dataclasses import replace

import pytest

from penstock.errors import ScheduleError
from penstock.schedules import Family, parse
from penstock.schedules.laws import SYNCHRONOUS, AtMostBytes, in_order
from penstock.schedules.lower import Lowering, lower
from penstock.schedules.memory import Sizes
from penstock.schedules.passes import add_communication
from penstock.schedules.transfers import Transfer, chain_transfers
from penstock.schedules.verify import verify
from tests.every_schedule import EVERY_SCHEDULE

WRONG = {
    "a forward is missing": (
        """
        rank 0 | 0F0 0F0>1 0B0<1 0B0
        rank 1 | 1B0 1B0>0
        """,
        "stage 1 has 0 Forward instructions for micro-batch 0",
    ),
    "a backward comes twice": (
        """
        rank 0 | 0F0 0F0>1 0B0<1 0B0 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "stage 0 has 2 Backward instructions for micro-batch 0",
    ),
    "the second part of a backward is missing": (
        """
        rank 0 | 0F0 0F0>1 0F1 0F1>1 0B0<1 0I0 0W0 0B1<1 0I1
        rank 1 | 1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1 1B1>0
        """,
        "stage 0 has 0 BackwardWeight instructions for micro-batch 1",
    ),
    "the parts of a backward in the other order": (
        """
        rank 0 | 0F0 0F0>1 0B0<1 0W0 0I0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "rank 0, 0W0: its BackwardInput has not run",
    ),
    "a backward before its forward": (
        """
        rank 0 | 0B0<1 0B0 0F0 0F0>1
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "rank 0, 0B0: its Forward has not run",
    ),
    "a message among many is never received": (
        """
        rank 0 | 0F0 0F0>1 0F1 0F1>1 0B0<1 0B0 0B1
        rank 1 | 1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1
        """,
        "rank 0, 0B1: 0B1<1 must come before it",
    ),
    "a stage runs on two ranks": (
        """
        rank 0 | 0F0 0F0>1 0B0<1
        rank 1 | 1F0<0 1F0 1B0 1B0>0 0B0
        """,
        "stage 0 runs on rank 0 and on rank 1",
    ),
    "nothing is received": (
        """
        rank 0 | 0F0 0B0<1 0B0
        rank 1 | 1F0 1B0 1B0>0
        """,
        "rank 1, 1F0: 1F0<0 must come before it",
    ),
    "a message is sent and never received": (
        """
        rank 0 | 0F0 0F0>1 0F0>1 0B0<1 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "stage 0 sends activations of micro-batches",
    ),
    "a message is sent and received twice": (
        """
        rank 0 | 0F0 0F0>1 0F0>1 0B0<1 0B0
        rank 1 | 1F0<0 1F0<0 1F0 1B0 1B0>0
        """,
        "stage 0 sends activations of micro-batches [0, 0] to stage 1",
    ),
    "values are sent before they exist": (
        """
        rank 0 | 0F0>1 0F0 0B0<1 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "rank 0, 0F0>1: its Forward must come before it",
    ),
    "a backward before its gradient came": (
        """
        rank 0 | 0F0 0F0>1 0B0 0B0<1
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "rank 0, 0B0: 0B0<1 must come before it",
    ),
    "a graph that was dropped and not rebuilt": (
        """
        rank 0 | 0f0 0F0>1 0B0<1 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "no Recompute has rebuilt it",
    ),
    "a recompute of what was kept": (
        """
        rank 0 | 0F0 0F0>1 0R0 0B0<1 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "there is nothing to recompute",
    ),
    "backwards out of order": (
        """
        rank 0 | 0F0 0F0>1 0F1 0F1>1 0B1<1 0B1 0B0<1 0B0
        rank 1 | 1F0<0 1F0 1F1<0 1F1 1B1 1B1>0 1B0 1B0>0
        """,
        "backwards of a stage must come in micro-batch order",
    ),
    "weight backwards out of order": (
        """
        rank 0 | 0F0 0F1 0I0 0I1 0W1 0W0
        """,
        "rank 0, 0W1: the backwards of a stage must come in micro-batch order",
    ),
    "a whole backward before the weight backward of an earlier micro-batch": (
        """
        rank 0 | 0F0 0F1 0I0 0B1 0W0
        """,
        "rank 0, 0B1: the backwards of a stage must come in micro-batch order",
    ),
    "a weight backward before its input backward": (
        """
        rank 0 | 0F0 0W0 0I0
        """,
        "rank 0, 0W0: ",
    ),
    "a weight backward that never comes": (
        """
        rank 0 | 0F0 0F1 0I0 0B1
        """,
        "stage 0 has 0 BackwardWeight instructions for micro-batch 0",
    ),
    "forwards out of order": (
        """
        rank 0 | 0F1 0F1>1 0F0 0F0>1 0B0<1 0B0 0B1<1 0B1
        rank 1 | 1F1<0 1F1 1F0<0 1F0 1B0 1B0>0 1B1 1B1>0
        """,
        "forwards of a stage must come in micro-batch order",
    ),
    "statistics committed too early": (
        """
        rank 0 | 0F0 0F0>1 0C 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1
        rank 1 | 1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1 1B1>0
        """,
        "after the statistics of its stage were committed",
    ),
    "statistics committed twice": (
        """
        rank 0 | 0F0 0F0>1 0C 0C 0B0<1 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "committed twice",
    ),
    "ranks that wait for each other": (
        """
        rank 0 | 0F0 0F0>1 0B0<1 0B0 0F1 0F1>1 0B1<1 0B1
        rank 1 | 1F0<0 1F0 1F1<0 1F1 1B0 1B0>0 1B1 1B1>0
        """,
        "rank 0 waits at 0B0<1, rank 1 waits at 1F1<0",
    ),
    "an edge nobody uses": (
        """
        rank 0 | 0F0 0F0>1 0B0<1 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0 1F0>0
        rank 2 | 2F0 2B0
        """,
        "stage 1 sends activations of micro-batches",
    ),
    "a message where nothing is to cross": (
        """
        rank 0 | 0F0 0F0>1 0F0>2 0B0<1 0B0<2 0B0
        rank 1 | 1F0<0 1F0 1F0>2 1B0<2 1B0 1B0>0
        rank 2 | 2F0<0 2F0<1 2F0 2B0 2B0>0 2B0>1
        """,
        "rank 0, 0F0>2: stage 2 uses nothing of stage 0",
    ),
    "gradients added up over replicas too early": (
        """
        rank 0 | 0F0 0F0>1 0F1 0F1>1 0B0<1 0B0 0G 0B1<1 0B1
        rank 1 | 1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1 1B1>0
        """,
        "rank 0, 0B1: a backward runs after the gradients of its stage were added up",
    ),
    "gradients added up over replicas twice": (
        """
        rank 0 | 0F0 0F0>1 0B0<1 0B0 0G 0G
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "its gradients are added up twice",
    ),
    "room made twice": (
        """
        rank 0 | 0F0 0F0>1 0B0?1 0B0?1 0B0<1 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "rank 0, 0B0?1: it is posted twice",
    ),
    "room made too late": (
        """
        rank 0 | 0F0 0F0>1 0B0<1 0B0?1 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "rank 0, 0B0?1: its receive stands before it",
    ),
    "moved away before it is there": (
        """
        rank 0 | 0H0 0F0 0F0>1 0D0 0B0<1 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "rank 0, 0H0: there is nothing to move away",
    ),
    "moved away once it is used up": (
        """
        rank 0 | 0F0 0F0>1 0B0<1 0B0 0H0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "rank 0, 0H0: there is nothing to move away",
    ),
    "moved away twice": (
        """
        rank 0 | 0F0 0F0>1 0H0 0D0 0H0 0B0<1 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "rank 0, 0H0: it is moved away twice",
    ),
    "brought back though it was there": (
        """
        rank 0 | 0F0 0F0>1 0D0 0H0 0B0<1 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "rank 0, 0D0: there is nothing to bring back",
    ),
    "brought back twice": (
        """
        rank 0 | 0F0 0F0>1 0H0 0D0 0D0 0B0<1 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "rank 0, 0D0: there is nothing to bring back",
    ),
    "moved away and not there for the backward": (
        """
        rank 0 | 0F0 0F0>1 0H0 0B0<1 0B0 0D0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "rank 0, 0B0: what it needs was moved away and no Fetch has brought it back",
    ),
    "moved away and not there for the recompute": (
        """
        rank 0 | 0f0 0F0>1 0H0 0R0 0D0 0B0<1 0B0
        rank 1 | 1F0<0 1F0 1B0 1B0>0
        """,
        "rank 0, 0R0: what it needs was moved away",
    ),
    "no instructions": ("rank 0 |", "the schedule runs nothing"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named(wrong: str) -> None:
    text, message = WRONG[wrong]
    schedule = parse("\n".join(line.strip() for line in text.strip().splitlines()))
    with pytest.raises(ScheduleError) as caught:
        verify(schedule, chain_transfers(max(schedule.num_stages, 1)))
    assert message in str(caught.value)


def test_the_spot_is_marked_in_the_grid() -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(parse("rank 0 | 0F0 0B0 0F1 0f2 0B1 0B2"), ())
    assert str(caught.value).splitlines()[-1] == (
        "rank 0 | 0F0 0B0 0F1 0f2 0B1 >>0B2<<   <-- here"
    )


def test_too_many_live_microbatches_are_refused() -> None:
    with pytest.raises(ScheduleError, match="its rank then keeps 3 bytes, 1 more than 2"):
        verify(
            parse("rank 0 | 0F0 0F1 0F2 0B0 0B1 0B2"), (), [AtMostBytes(Sizes(kept_bytes=1), 2)]
        )


def test_a_family_names_the_laws_that_hold_for_it() -> None:
    text = "rank 0 | 0F0 0F1 0B1 0B0"
    unordered = tuple(law for law in SYNCHRONOUS if law is not in_order)
    verify(parse(text), (), unordered)
    family = Family("last_first", lambda num_stages, num_microbatches: parse(text))
    with pytest.raises(ScheduleError, match="backwards of a stage must come in micro-batch order"):
        lower(Lowering(family=family, ranks=(0,)), 2)
    lowered = lower(Lowering(family=replace(family, laws=unordered), ranks=(0,)), 2)
    assert str(lowered) == text


@pytest.mark.parametrize("function", EVERY_SCHEDULE, ids=str)
def test_every_schedule_is_proved_for_chains_and_skips(function: Family) -> None:
    for p in range(1, 6):
        for m in (1, 2, 3, 8):
            skips = [
                Transfer(producer=s, consumer=t) for s in range(p) for t in range(s + 2, p, 2)
            ]
            transfers = (*chain_transfers(p), *skips)
            schedule = add_communication(function(p, m), transfers)
            verify(schedule, transfers)
            assert (schedule.num_stages, schedule.num_microbatches) == (p, m)
