"""What ranks keep of a schedule, in bytes, and the law that limits it."""

import re

import pytest

from penstock.errors import ConfigError, ScheduleError
from penstock.schedules import AtMostBytes, Schedule, Sizes, gpipe, one_f_one_b, parse
from penstock.schedules.laws import verify
from penstock.schedules.memory import live_bytes, peak_bytes
from penstock.schedules.passes import add_recompute

SIZES = Sizes(kept_bytes=100, input_bytes=10, weight_bytes=40)


@pytest.mark.parametrize(
    ("program", "live"),
    (
        ("0F0 0F1 0B0 0B1", [100, 200, 100, 0]),
        ("0F0 0F1 0I0 0I1 0W0 0W1", [100, 200, 140, 80, 40, 0]),
        ("0f0 0f1 0R0 0B0 0R1 0I1 0W1", [10, 20, 110, 10, 100, 40, 0]),
        ("0F0 0F0>1 0C 0B0 0G", [100, 100, 100, 0, 0]),
    ),
)
def test_bytes_are_kept_from_a_forward_to_the_end_of_its_backward(program, live) -> None:
    (only,) = parse(f"rank 0 | {program}").programs
    assert list(live_bytes(only, SIZES.of_stages(1))) == live


def test_what_is_left_for_weights_is_as_much_as_the_graph_where_it_is_not_given() -> None:
    schedule = parse("rank 0 | 0F0 0I0 0F1 0I1 0W0 0W1")
    assert peak_bytes(schedule, Sizes(kept_bytes=100)) == (200,)


def test_the_peak_of_1f1b_falls_from_rank_to_rank() -> None:
    assert peak_bytes(one_f_one_b(3, 8), Sizes(kept_bytes=(1, 10, 100))) == (3, 20, 100)
    assert peak_bytes(gpipe(3, 8), SIZES) == (800,) * 3
    assert peak_bytes(add_recompute(gpipe(3, 8)), SIZES) == (7 * 10 + 100,) * 2 + (170,)


def check(schedule: Schedule, limit: AtMostBytes) -> None:
    verify(schedule, (), [limit])


def test_a_rank_over_its_limit_is_marked() -> None:
    schedule = one_f_one_b(2, 3)
    check(schedule, AtMostBytes(SIZES, (200, 100)))
    message = "rank 0, 0F1: its rank then keeps 200 bytes, 50 more than 150"
    with pytest.raises(ScheduleError, match=re.escape(message)):
        check(schedule, AtMostBytes(SIZES, 150))


def test_sizes_and_limits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="limit_bytes has 3 entries, the schedule has 2 ranks"):
        check(gpipe(2, 1), AtMostBytes(SIZES, (1, 2, 3)))
    with pytest.raises(ConfigError, match=r"Sizes\.kept_bytes has 1 entries, the schedule has 2"):
        check(gpipe(2, 1), AtMostBytes(Sizes(kept_bytes=(1,)), 1))
    with pytest.raises(ConfigError, match=r"input_bytes is \(1, -1\): nothing takes less than 0"):
        Sizes(kept_bytes=1, input_bytes=(1, -1))


def test_what_is_moved_away_is_not_kept_until_it_is_back() -> None:
    sizes = Sizes(kept_bytes=100, input_bytes=10, stay_bytes=4)
    program = parse("rank 0 | 0F0 0H0 0f1 0H1 0F2 0D0 0B0 0D1 0R1 0B1 0B2").programs[0]
    kept = [*live_bytes(program, sizes.of_stages(1))]
    assert kept == [100, 4, 14, 8, 108, 204, 104, 110, 200, 100, 0]
