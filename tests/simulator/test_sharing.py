"""Links and cores that ranks share: exact times, and a second simulator that knows no tricks."""

from collections.abc import Mapping
from fractions import Fraction
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedules import (
    Schedule,
    gpipe,
    interleaved_1f1b,
    ir,
    one_f_one_b,
    parse,
    zb_h1,
)
from penstock.schedules.passes import add_communication, add_recompute, add_reductions
from penstock.schedules.transfers import Transfer, Transfers, chain_transfers
from penstock.simulator import UNIT_COSTS, Costs, Pool, Sharing, Way, simulate
from penstock.simulator.engine import Edge, compiled
from penstock.simulator.simulate import step_s
from tests.simulator.event_by_event import EventByEvent

HALF: Any = Fraction(1, 2)
ONE: Any = Fraction(1)
THIRD: Any = Fraction(1, 3)


def sharing(ways: Mapping[Edge, Way] | Way, *pools: Pool, **more: Any) -> Sharing:
    def way_of(edge: Edge) -> Way:
        return ways if isinstance(ways, Way) else ways[edge]

    return Sharing(way_of=way_of, pools=pools, **more)


def times(
    schedule: Schedule, costs: Costs, shared: Sharing, transfers: Transfers | None = None
) -> dict[str, tuple[Any, Any]]:
    """Map each instruction's word to its start and end."""
    spans = simulate(schedule, costs, transfers=transfers, sharing=shared).spans
    return {str(span.instruction): (span.start_s, span.end_s) for span in spans}


def test_a_message_takes_its_lane_then_its_latency_and_the_sender_goes_on() -> None:
    way = Way(lanes=("a",), lane_s=2, latency_s=HALF, send_s=THIRD, receive_s=1)
    found = times(gpipe(2, 1), UNIT_COSTS, sharing(way))
    assert found["0F0>1"] == (1, 1 + THIRD)
    assert found["1F0<0"] == (0, 1 + THIRD + 2 + HALF + 1)


def test_messages_on_one_lane_follow_one_another() -> None:
    found = times(gpipe(2, 3), UNIT_COSTS, sharing(Way(lanes=("a",), lane_s=5)))
    assert [found[f"1F{i}"][0] for i in range(3)] == [6, 11, 16]


def test_a_sender_that_blocks_waits_until_the_lane_is_free_and_its_message_has_left() -> None:
    found = times(gpipe(2, 2), UNIT_COSTS, sharing(Way(lanes=("a",), lane_s=5, blocks=True)))
    assert found["0F0>1"] == (1, 6)
    assert found["0F1"] == (6, 7)


def test_the_first_to_send_has_the_lane_whatever_its_rank() -> None:
    schedule = parse("rank 0 | 0F0 0F0>2\nrank 1 | 1F0 1F0>2\nrank 2 | 2F0<1 2F0<0 2F0")
    costs = Costs(forward_s=(3, 1, 1), backward_s=1)
    found = times(schedule, costs, sharing(Way(lanes=("port",), lane_s=10)))
    assert found["2F0<1"] == (0, 11)
    assert found["2F0<0"] == (11, 21)


def test_both_directions_share_a_lane_that_is_not_duplex() -> None:
    schedule = parse("rank 0 | 0F0 0F0>1 0F1<1 0B0\nrank 1 | 1F1 1F1>0 1F0<0 1F0")
    found = times(schedule, UNIT_COSTS, sharing(Way(lanes=("bus",), lane_s=4)))
    assert found["1F0<0"][1] == 5
    assert found["0F1<1"][1] == 9


def test_ranks_on_the_same_cores_slow_each_other_down() -> None:
    schedule = parse("rank 0 | 0F0 0F1\nrank 1 | 1F0")
    costs = Costs(forward_s=(1, 3), backward_s=1)
    pool = Pool((0, 1), (1, HALF))
    found = times(schedule, costs, sharing(Way(), pool), ())
    assert found == {"0F0": (0, 2), "0F1": (2, 4), "1F0": (0, 5)}


def test_more_ranks_than_cores_share_what_the_cores_give() -> None:
    schedule = parse("rank 0 | 0F0\nrank 1 | 1F0\nrank 2 | 2F0")
    costs = Costs(forward_s=1, backward_s=1)
    found = times(schedule, costs, sharing(Way(), Pool((0, 1, 2), (1, 1))), ())
    assert {end for _, end in found.values()} == {Fraction(3, 2)}


def test_a_rank_that_waits_slows_nobody_down() -> None:
    found = times(gpipe(2, 1), UNIT_COSTS, sharing(Way(), Pool((0, 1), (1, HALF))))
    assert found["0B0"] == (4, 6)


def test_sums_over_replicas_run_beside_the_rest_and_one_after_the_other() -> None:
    schedule = parse("rank 0 | 0F0 0G 0B0 1F0 1G 1B0")
    costs = Costs(forward_s=1, backward_s=2, reduce_s=(10, 5))
    timeline = simulate(schedule, costs, transfers=())
    assert [span.end_s for span in timeline.spans] == [1, 1, 3, 4, 6, 18]
    left = timeline.spans[-1]  # 10 from 3 on, then 5: the rank ends at 6
    assert (str(left.instruction), left.start_s) == ("1G", 6)
    assert [own.wait_s for own in timeline.breakdown().stages] == [0, 12]


def test_spans_of_sends_know_the_bytes_of_their_tensors() -> None:
    shared = sharing(Way(), num_bytes={(False, 0, 1): 7, (True, 1, 0): 9})
    assert simulate(gpipe(2, 3), UNIT_COSTS, sharing=shared).moved_bytes() == {
        (0, 1): 21,
        (1, 0): 27,
    }


def test_ranks_that_wait_for_each_other_are_an_error_with_shared_links_too() -> None:
    stuck = parse("rank 0 | 0F0<1 0F0 0F0>1\nrank 1 | 1F0<0 1F0 1F0>0")
    for shared in (None, sharing(Way(lanes=("a",))), sharing(Way(), Pool((0, 1), (1,)))):
        with pytest.raises(
            ScheduleError, match="cannot end: rank 0 waits at 0F0<1, rank 1 waits at 1F0<0"
        ):
            simulate(stuck, UNIT_COSTS, sharing=shared)


SMALL: st.SearchStrategy[Any] = st.integers(0, 6).map(lambda n: Fraction(n, 2))


@pytest.mark.parametrize("family", (gpipe, one_f_one_b, zb_h1(), interleaved_1f1b(2)))
@pytest.mark.parametrize("num_microbatches", (1, 4, 9))
def test_the_step_alone_is_the_timelines_to_the_last_digit(family, num_microbatches) -> None:
    random = Random(num_microbatches)
    schedule = add_recompute(family(4, num_microbatches))
    schedule = add_communication(add_reductions(schedule), chain_transfers(4))

    def each() -> tuple[float, ...]:
        return tuple(random.random() for _ in range(4))

    costs = Costs(forward_s=each(), backward_s=each(), recompute_s=each(), reduce_s=each())
    way = Way(lanes=("a", "b"), lane_s=random.random(), latency_s=random.random())
    for shared in (
        None,
        sharing(way),
        sharing(way, Pool((0, 1), (1.0, random.random(), random.random() / 2))),
    ):
        told = simulate(schedule, costs, sharing=shared).step_s
        assert step_s(compiled(schedule), costs, shared) == told


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_times_are_those_of_a_simulator_that_looks_at_every_rank_each_time(data) -> None:
    num_stages, num_microbatches = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 4))
    family = data.draw(st.sampled_from([gpipe, one_f_one_b, zb_h1()]))
    transfers = [*chain_transfers(num_stages)]
    if num_stages > 2 and data.draw(st.booleans()):
        transfers.append(Transfer(producer=0, consumer=num_stages - 1))
    schedule = family(num_stages, num_microbatches)
    if data.draw(st.booleans()):
        schedule = add_recompute(schedule)
    schedule = add_communication(schedule, transfers)
    edges = [(False, t.producer, t.consumer) for t in transfers]
    edges += [(True, t.consumer, t.producer) for t in transfers]
    lanes = st.lists(st.sampled_from("abc"), max_size=2, unique=True).map(tuple)
    ways = {
        edge: Way(
            lanes=data.draw(lanes),
            lane_s=data.draw(SMALL),
            latency_s=data.draw(SMALL),
            send_s=data.draw(SMALL),
            receive_s=data.draw(SMALL),
            blocks=data.draw(st.booleans()),
        )
        for edge in edges
    }
    everyone = tuple(range(num_stages))
    pools = data.draw(
        st.sampled_from(
            [
                (),
                (Pool(everyone, (ONE, HALF)),),
                (Pool((0, 1), (ONE, ONE, HALF)),),
                (Pool((0, 1), (ONE,)), Pool(everyone[2:], (ONE, HALF))),
            ]
        )
    )
    each = st.lists(SMALL, min_size=num_stages, max_size=num_stages).map(tuple)
    names = ("forward_s", "backward_s", "recompute_s", "backward_input_s", "backward_weight_s")
    costs: dict[str, Any] = {name: data.draw(each) for name in names}
    kinds: tuple[type, ...] = (
        *(ir.Forward, ir.Backward, ir.Recompute, ir.BackwardInput, ir.BackwardWeight),
    )
    told = simulate(schedule, Costs(**costs), sharing=sharing(ways, *pools))
    found = [[s.end_s for s in told.spans if s.rank == rank] for rank in range(num_stages)]
    seconds: dict[type, Any] = dict(zip(kinds, costs.values(), strict=True))
    assert found == EventByEvent(schedule, seconds, ways, pools).run()
