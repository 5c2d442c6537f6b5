"""Schedules as data: their grids, their text both ways, and what each pass does to them."""

import re
from typing import get_args

import pytest

from benchmarks.all_pairs import all_pairs
from penstock.errors import ScheduleError
from penstock.schedules import Schedule, eager_1f1b, gpipe, ir, one_f_one_b, parse
from penstock.schedules.laws import SYNCHRONOUS, AtMostBytes, Law, verify
from penstock.schedules.lower import Lowering, Mode, lower
from penstock.schedules.memory import Sizes, peak_bytes
from penstock.schedules.passes import (
    add_commits,
    add_communication,
    add_offload,
    add_recompute,
    backward_half,
    forward_half,
    forwards_first,
)
from penstock.schedules.text import parse_instruction
from penstock.schedules.transfers import Transfer, chain_transfers
from tests.every_schedule import EVERY_SCHEDULE

SIZES = [(p, m) for p in range(1, 6) for m in (1, 2, 3, 4, 8)]
"""(stages, micro-batches), fewer micro-batches than stages included."""


def words(schedule: Schedule) -> str:
    """The text form with single spaces, to compare with a grid drawn by hand."""
    return "\n".join(" ".join(line.split()) for line in str(schedule).splitlines())


def grid(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


def test_gpipe_runs_all_forwards_then_all_backwards_in_order() -> None:
    assert words(gpipe(3, 4)) == grid("""
        rank 0 | 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
        rank 1 | 1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
        rank 2 | 2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
    """)


def test_eager_1f1b_runs_nearly_twice_as_far_ahead() -> None:
    assert words(eager_1f1b(3, 6)) == grid("""
        rank 0 | 0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5
        rank 1 | 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
        rank 2 | 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5
    """)


def test_1f1b_with_fewer_microbatches_than_stages() -> None:
    assert words(one_f_one_b(4, 2)) == grid("""
        rank 0 | 0F0 0F1 0B0 0B1
        rank 1 | 1F0 1F1 1B0 1B1
        rank 2 | 2F0 2F1 2B0 2B1
        rank 3 | 3F0 3B0 3F1 3B1
    """)


def test_recompute_comes_before_the_gradient_is_awaited() -> None:
    lowered = add_communication(add_recompute(one_f_one_b(2, 2)), chain_transfers(2))
    assert words(lowered) == grid("""
        rank 0 | 0f0 0F0>1 0f1 0F1>1 0R0 0B0<1 0B0 0R1 0B1<1 0B1
        rank 1 | 1F0<0 1F0 1B0 1B0>0 1F1<0 1F1 1B1 1B1>0
    """)


def test_a_backward_that_follows_at_once_keeps_its_graph() -> None:
    assert words(add_recompute(one_f_one_b(1, 2))) == "rank 0 | 0F0 0B0 0F1 0B1"
    assert words(add_recompute(gpipe(1, 1))) == "rank 0 | 0F0 0B0"


def test_an_edge_may_skip_stages() -> None:
    transfers = (*chain_transfers(3), Transfer(producer=0, consumer=2))
    assert words(add_communication(gpipe(3, 1), transfers)) == grid("""
        rank 0 | 0F0 0F0>1 0F0>2 0B0<1 0B0<2 0B0
        rank 1 | 1F0<0 1F0 1F0>2 1B0<2 1B0 1B0>0
        rank 2 | 2F0<0 2F0<1 2F0 2B0 2B0>0 2B0>1
    """)


def test_statistics_are_committed_after_the_last_forward() -> None:
    assert words(add_commits(one_f_one_b(2, 2), [0])) == grid("""
        rank 0 | 0F0 0F1 0C 0B0 0B1
        rank 1 | 1F0 1B0 1F1 1B1
    """)


def test_what_is_moved_away_is_back_one_instruction_early() -> None:
    moved = add_offload(add_recompute(gpipe(2, 4), [0]), [0])
    assert words(add_communication(moved, chain_transfers(2))) == grid(
        """
        rank 0 | 0f0 0F0>1 0H0 0f1 0F1>1 0H1 0f2 0F2>1 0H2 0D0 0f3 0F3>1 0H3
                 0R0 0D1 0B0<1 0B0 0R1 0D2 0B1<1 0B1 0R2 0D3 0B2<1 0B2 0R3 0B3<1 0B3
        rank 1 | 1F0<0 1F0 1F1<0 1F1 1F2<0 1F2 1F3<0 1F3
                 1B0 1B0>0 1B1 1B1>0 1B2 1B2>0 1B3 1B3>0
    """.replace("\n                 ", " ")
    )


def test_what_is_needed_soon_is_not_moved_away() -> None:
    assert add_offload(one_f_one_b(1, 3), [0]) == one_f_one_b(1, 3)
    assert words(add_offload(one_f_one_b(2, 3), [0, 1])) == grid("""
        rank 0 | 0F0 0F1 0H1 0B0 0D1 0F2 0B1 0B2
        rank 1 | 1F0 1B0 1F1 1B1 1F2 1B2
    """)


def test_forwards_first_gives_two_halves() -> None:
    schedule = add_recompute(forwards_first(one_f_one_b(2, 2)))
    assert words(forward_half(schedule)) == "rank 0 | 0f0 0f1\nrank 1 | 1f0 1f1"
    assert words(backward_half(schedule)) == grid("""
        rank 0 | 0R0 0B0 0R1 0B1
        rank 1 | 1R0 1B0 1R1 1B1
    """)


@pytest.mark.parametrize("function", EVERY_SCHEDULE, ids=str)
def test_every_lowered_schedule_reads_back_from_its_text(function) -> None:
    for (p, m), recompute, mode in all_pairs([SIZES[::3], (True, False), tuple(Mode)]):
        how = Lowering(
            family=function,
            ranks=function.ranks(p),
            transfers=chain_transfers(p),
            recompute=range(p) if recompute else (),
            offload=range(p),
            commits=[0],
        )
        lowered = lower(how, m, mode)
        assert parse(str(lowered)) == lowered


@pytest.mark.parametrize("p, m", SIZES)
def test_1f1b_keeps_at_most_p_minus_s_microbatches_and_gpipe_all(p: int, m: int) -> None:
    chain, sizes = chain_transfers(p), Sizes(kept_bytes=1)
    laws: tuple[Law, ...] = (*SYNCHRONOUS, AtMostBytes(sizes, p))
    schedule = add_communication(one_f_one_b(p, m), chain)
    verify(schedule, chain, laws)
    assert peak_bytes(schedule, sizes) == tuple(min(p - s, m) for s in range(p))
    assert peak_bytes(gpipe(p, m), sizes) == (m,) * p


def number_the_numbers(word: str) -> str:
    """Give each number in a word a value of its own."""
    numbers = iter(("12", "3", "4"))
    return re.sub("0", lambda _: next(numbers), word)


def test_every_instruction_reads_back_from_its_word() -> None:
    words = [number_the_numbers(word) for word in ir.WORDS]
    read = [parse_instruction(word) for word in words]
    assert list(map(str, read)) == words
    assert {type(instruction) for instruction in read} == {*get_args(ir.Instruction)}


@pytest.mark.parametrize(
    "text, message",
    (
        ("rank 1 | 0F0", "line 1 must start with 'rank 0 |'"),
        ("rank 0 | 0X0", "'0X0' is not an instruction"),
        ("rank 0 | 0U3", "'0U3' is not an instruction"),
        ("rank 0 | 0F", "'0F' is not an instruction"),
        ("rank 0 | 0R0>1", "only F and B have a peer"),
    ),
)
def test_text_that_is_no_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message.replace("|", r"\|")):
        parse(text)
