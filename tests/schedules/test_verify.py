"""The verifier: every way in which a schedule can be wrong is named, and the spot is marked."""

import re
from dataclasses import replace

import pytest

from penstock.errors import ScheduleError
from penstock.schedules import Family, parse
from penstock.schedules.laws import SYNCHRONOUS, in_order, verify
from penstock.schedules.lower import Lowering, lower
from penstock.schedules.passes import add_communication
from penstock.schedules.transfers import Transfer, chain_transfers
from tests.every_schedule import EVERY_SCHEDULE

WRONG = """
a forward is missing -> stage 1 has 0 Forward instructions for micro-batch 0
    rank 0 | 0F0 0F0>1 0B0<1 0B0
    rank 1 | 1B0 1B0>0
a backward comes twice -> stage 0 has 2 Backward instructions for micro-batch 0
    rank 0 | 0F0 0F0>1 0B0<1 0B0 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
the second part of a backward is missing -> stage 0 has 0 BackwardWeight instructions for m
    rank 0 | 0F0 0F0>1 0F1 0F1>1 0B0<1 0I0 0W0 0B1<1 0I1
    rank 1 | 1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1 1B1>0
the parts of a backward in the other order -> rank 0, 0W0: its BackwardInput has not run
    rank 0 | 0F0 0F0>1 0B0<1 0W0 0I0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
a backward before its forward -> rank 0, 0B0: its Forward has not run
    rank 0 | 0B0<1 0B0 0F0 0F0>1
    rank 1 | 1F0<0 1F0 1B0 1B0>0
a message among many is never received -> rank 0, 0B1: 0B1<1 must come before it
    rank 0 | 0F0 0F0>1 0F1 0F1>1 0B0<1 0B0 0B1
    rank 1 | 1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1
a stage runs on two ranks -> stage 0 runs on rank 0 and on rank 1
    rank 0 | 0F0 0F0>1 0B0<1
    rank 1 | 1F0<0 1F0 1B0 1B0>0 0B0
nothing is received -> rank 1, 1F0: 1F0<0 must come before it
    rank 0 | 0F0 0B0<1 0B0
    rank 1 | 1F0 1B0 1B0>0
a message is sent and never received -> stage 0 sends activations of micro-batches
    rank 0 | 0F0 0F0>1 0F0>1 0B0<1 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
a message is sent and received twice -> stage 0 sends activations of micro-batches [0, 0] to
    rank 0 | 0F0 0F0>1 0F0>1 0B0<1 0B0
    rank 1 | 1F0<0 1F0<0 1F0 1B0 1B0>0
values are sent before they exist -> rank 0, 0F0>1: its Forward must come before it
    rank 0 | 0F0>1 0F0 0B0<1 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
a backward before its gradient came -> rank 0, 0B0: 0B0<1 must come before it
    rank 0 | 0F0 0F0>1 0B0 0B0<1
    rank 1 | 1F0<0 1F0 1B0 1B0>0
a graph that was dropped and not rebuilt -> no Recompute has rebuilt it
    rank 0 | 0f0 0F0>1 0B0<1 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
a recompute of what was kept -> there is nothing to recompute
    rank 0 | 0F0 0F0>1 0R0 0B0<1 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
backwards out of order -> backwards of a stage must come in micro-batch order
    rank 0 | 0F0 0F0>1 0F1 0F1>1 0B1<1 0B1 0B0<1 0B0
    rank 1 | 1F0<0 1F0 1F1<0 1F1 1B1 1B1>0 1B0 1B0>0
weight backwards out of order -> 0W1: the backwards of a stage must come in micro-batch order
    rank 0 | 0F0 0F1 0I0 0I1 0W1 0W0
a whole backward before the weight backward of an earlier micro-batch -> 0B1: the backwards of a st
    rank 0 | 0F0 0F1 0I0 0B1 0W0
a weight backward before its input backward -> rank 0, 0W0: 
    rank 0 | 0F0 0W0 0I0
a weight backward that never comes -> stage 0 has 0 BackwardWeight instructions for micro-batch 0
    rank 0 | 0F0 0F1 0I0 0B1
forwards out of order -> forwards of a stage must come in micro-batch order
    rank 0 | 0F1 0F1>1 0F0 0F0>1 0B0<1 0B0 0B1<1 0B1
    rank 1 | 1F1<0 1F1 1F0<0 1F0 1B0 1B0>0 1B1 1B1>0
statistics committed too early -> after the statistics of its stage were committed
    rank 0 | 0F0 0F0>1 0C 0F1 0F1>1 0B0<1 0B0 0B1<1 0B1
    rank 1 | 1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1 1B1>0
statistics committed twice -> committed twice
    rank 0 | 0F0 0F0>1 0C 0C 0B0<1 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
ranks that wait for each other -> rank 0 waits at 0B0<1, rank 1 waits at 1F1<0
    rank 0 | 0F0 0F0>1 0B0<1 0B0 0F1 0F1>1 0B1<1 0B1
    rank 1 | 1F0<0 1F0 1F1<0 1F1 1B0 1B0>0 1B1 1B1>0
an edge nobody uses -> stage 1 sends activations of micro-batches
    rank 0 | 0F0 0F0>1 0B0<1 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0 1F0>0
    rank 2 | 2F0 2B0
a message where nothing is to cross -> rank 0, 0F0>2: stage 2 uses nothing of stage 0
    rank 0 | 0F0 0F0>1 0F0>2 0B0<1 0B0<2 0B0
    rank 1 | 1F0<0 1F0 1F0>2 1B0<2 1B0 1B0>0
    rank 2 | 2F0<0 2F0<1 2F0 2B0 2B0>0 2B0>1
gradients added up over replicas too early -> 0B1: a backward runs after the gradients of
    rank 0 | 0F0 0F0>1 0F1 0F1>1 0B0<1 0G 0B0 0B1<1 0B1
    rank 1 | 1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1 1B1>0
gradients added up over replicas too late -> 0G: no backward follows in which to add them up
    rank 0 | 0F0 0F0>1 0B0<1 0B0 0G
    rank 1 | 1F0<0 1F0 1B0 1B0>0
gradients added up over replicas twice -> its gradients are added up twice
    rank 0 | 0F0 0F0>1 0B0<1 0G 0G 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
room made twice -> rank 0, 0B0?1: it is posted twice
    rank 0 | 0F0 0F0>1 0B0?1 0B0?1 0B0<1 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
room made too late -> rank 0, 0B0?1: its receive stands before it
    rank 0 | 0F0 0F0>1 0B0<1 0B0?1 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
moved away before it is there -> rank 0, 0H0: there is nothing to move away
    rank 0 | 0H0 0F0 0F0>1 0D0 0B0<1 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
moved away once it is used up -> rank 0, 0H0: there is nothing to move away
    rank 0 | 0F0 0F0>1 0B0<1 0B0 0H0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
moved away twice -> rank 0, 0H0: it is moved away twice
    rank 0 | 0F0 0F0>1 0H0 0D0 0H0 0B0<1 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
brought back though it was there -> rank 0, 0D0: there is nothing to bring back
    rank 0 | 0F0 0F0>1 0D0 0H0 0B0<1 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
brought back twice -> rank 0, 0D0: there is nothing to bring back
    rank 0 | 0F0 0F0>1 0H0 0D0 0D0 0B0<1 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
moved away and not there for the backward -> 0B0: what it needs was moved away and no F
    rank 0 | 0F0 0F0>1 0H0 0B0<1 0B0 0D0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
moved away and not there for the recompute -> rank 0, 0R0: what it needs was moved away
    rank 0 | 0f0 0F0>1 0H0 0R0 0D0 0B0<1 0B0
    rank 1 | 1F0<0 1F0 1B0 1B0>0
no instructions -> the schedule runs nothing
    rank 0 |
"""


CASES = [re.split(" -> |\n", case, maxsplit=2) for case in re.split(r"\n(?=\w)", WRONG.strip())]


@pytest.mark.parametrize(("wrong", "message", "text"), CASES, ids=[name for name, *_ in CASES])
def test_what_is_wrong_is_named(wrong: str, message: str, text: str) -> None:
    schedule = parse("\n".join(map(str.strip, text.splitlines())))
    with pytest.raises(ScheduleError) as caught:
        verify(schedule, chain_transfers(max(schedule.num_stages, 1)))
    assert message in str(caught.value)


def test_the_spot_is_marked_in_the_grid() -> None:
    with pytest.raises(ScheduleError) as caught:
        verify(parse("rank 0 | 0F0 0B0 0F1 0f2 0B1 0B2"), ())
    assert str(caught.value).splitlines()[-1] == (
        "rank 0 | 0F0 0B0 0F1 0f2 0B1 >>0B2<<   <-- here"
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
