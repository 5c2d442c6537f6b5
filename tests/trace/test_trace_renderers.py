"""One timeline, seen as a terminal grid and a Chrome trace."""

import json
from dataclasses import fields
from fractions import Fraction
from typing import get_args

import pytest

from penstock.schedules import Forward, gpipe, ir, one_f_one_b, parse
from penstock.schedules.passes import add_commits, add_recompute
from penstock.simulator import UNIT_COSTS, Costs, simulate
from penstock.trace import MemorySample, Span, Timeline, render_grid, to_chrome
from penstock.trace.breakdown import StageTimes
from penstock.trace.looks import LOOKS
from penstock.trace.units import bytes_text, time_text

MILLISECONDS = Costs(forward_s=0.001, backward_s=0.002, recompute_s=0.001, transfer_s=0.00025)


def drawn(text: str) -> str:
    """Take the indentation off an expected drawing."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_every_instruction_has_its_row_in_the_table_of_looks() -> None:
    assert LOOKS.keys() == {*get_args(ir.Instruction)}
    columns = {field.name for field in fields(StageTimes)}
    assert {look.counts_as for look in LOOKS.values()} <= columns


class TestGrid:
    def test_gpipe(self):
        assert render_grid(simulate(gpipe(3, 4), UNIT_COSTS), width=60) == drawn("""
            rank 0 |F0F1F2F3............B0  B1  B2  B3  |
            rank 1 |..F0F1F2F3......B0  B1  B2  B3  ....|
            rank 2 |....F0F1F2F3B0  B1  B2  B3  ........|
            F forward  B backward  . idle    step 18 s, bubble 33.3%
        """)

    def test_1f1b_with_recompute(self):
        timeline = simulate(add_recompute(one_f_one_b(3, 4)), UNIT_COSTS)
        assert render_grid(timeline, width=80) == drawn("""
            rank 0 |F0 F1 F2 R0 .........B0    F3 R1 B1    R2 ...B2    R3 B3    |
            rank 1 |...F0 F1 R0 ...B0    F2 R1 B1    F3 R2 B2    R3 B3    ......|
            rank 2 |......F0 B0    F1 B1    F2 B2    ...F3 B3    ...............|
            F forward  R recompute  B backward  . idle    step 20 s, bubble 26.7%
        """)

    def test_boxes_too_narrow_for_numbers_are_filled_with_their_letter(self):
        assert render_grid(simulate(gpipe(2, 12), UNIT_COSTS), width=50) == drawn("""
            rank 0 |FFFFFFFFFFFF...B0B1B2B3B4B5B6B7B8B9BBBB|
            rank 1 |.FFFFFFFFFFFFB0B1B2B3B4B5B6B7B8B9BBBB..|
            F forward  B backward  . idle    step 39 s, bubble 7.7%
        """)

    def test_boxes_narrower_than_a_column_are_shown_in_their_proportion(self):
        grid = render_grid(simulate(one_f_one_b(4, 300), UNIT_COSTS), width=80)
        for line in grid.splitlines()[:4]:
            assert line.count("B") == pytest.approx(2 * line.count("F"), rel=0.15)

    def test_a_rank_with_several_stages_names_them(self):
        schedule = parse("rank 0 | 0F0 2F0\nrank 1 | 1F0 3F0")
        assert render_grid(simulate(schedule, UNIT_COSTS), width=24) == drawn("""
            rank 0 |0F0...2F0...|
            rank 1 |...1F0...3F0|
            F forward  . idle    step 4 s, bubble 50.0%
        """)

    def test_fractions_of_a_second_set_on_columns_as_whole_seconds_do(self):
        third = Fraction(1, 3)
        small = Costs(forward_s=third, backward_s=2 * third, recompute_s=third)
        by_fractions = render_grid(simulate(gpipe(3, 4), small), width=60).splitlines()
        by_seconds = render_grid(simulate(gpipe(3, 4), UNIT_COSTS), width=60).splitlines()
        assert by_fractions[:3] == by_seconds[:3]

    @pytest.mark.parametrize("width", [10, 33, 80, 100, 201])
    def test_no_row_is_wider_than_asked_for(self, width):
        grid = render_grid(simulate(add_recompute(gpipe(4, 7)), MILLISECONDS), width=width)
        rows = [line for line in grid.splitlines() if line.startswith("rank")]
        assert len({len(row) for row in rows}) == 1
        assert len(rows[0]) <= width

    def test_an_empty_timeline_is_drawn_empty(self):
        assert "bubble 0.0%" in render_grid(Timeline(()))

    def test_spans_that_take_no_time_are_drawn_as_nothing(self):
        assert "rank 0 |..." in render_grid(Timeline((Span(0, Forward(0, 0), 1.0, 1.0),)))


COUNTER = {"ph", "pid", "name", "ts", "args"}


class TestChrome:
    def test_every_span_is_a_slice_in_microseconds_on_its_rank(self):
        timeline = simulate(add_commits(add_recompute(gpipe(2, 2)), [1]), MILLISECONDS)
        slices = [e for e in json.loads(to_chrome(timeline))["traceEvents"] if e["ph"] == "X"]
        assert len(slices) == len(timeline.spans)
        assert slices[0] == {
            "ph": "X",
            "pid": 0,
            "tid": 0,
            "cat": "forward",
            "name": "F0",
            "ts": 0.0,
            "dur": 1000.0,
            "args": {"stage": 0, "microbatch": 0, "keep_graph": False, "version": 0},
        }
        assert {event["cat"] for event in slices} == {
            *("forward", "recompute", "backward", "send", "receive", "statistics"),
        }
        assert {event["tid"] for event in slices} == {0, 1}

    def test_an_arrow_leads_from_each_send_to_its_receive(self):
        timeline = simulate(gpipe(2, 3), MILLISECONDS)
        events = json.loads(to_chrome(timeline))["traceEvents"]
        starts = {event["id"]: event for event in events if event["ph"] == "s"}
        ends = {event["id"]: event for event in events if event["ph"] == "f"}
        assert len(starts) == 6
        assert starts.keys() == ends.keys()
        for number, start in starts.items():
            assert start["tid"] != ends[number]["tid"]
            assert ends[number]["ts"] >= start["ts"] + 250 - 1e-6

    def test_time_begins_at_zero_and_ranks_are_named(self):
        timeline = Timeline((Span(0, Forward(0, 0), 5.0, 6.0), Span(1, Forward(1, 0), 6.0, 7.0)))
        events = json.loads(to_chrome(timeline))["traceEvents"]
        assert [event["ts"] for event in events if event["ph"] == "X"] == [0, 1_000_000]
        names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
        assert names == ["rank 0", "rank 1"]

    def test_kept_bytes_are_counters(self):
        timeline = Timeline((Span(0, Forward(0, 0), 0.0, 1.0),), (MemorySample(0, 1.0, 4096),))
        events = json.loads(to_chrome(timeline))["traceEvents"]
        (counter,) = (event for event in events if event["ph"] == "C")
        assert counter["name"] == "stage 0 kept bytes" and counter.keys() == COUNTER
        assert (counter["pid"], counter["ts"], counter["args"]) == (0, 1_000_000, {"bytes": 4096})

    def test_exact_times_are_written_as_plain_numbers(self):
        costs = Costs(forward_s=Fraction(1, 4), backward_s=Fraction(1, 2), recompute_s=0)
        events = json.loads(to_chrome(simulate(gpipe(1, 1), costs)))["traceEvents"]
        assert [event["dur"] for event in events if event["ph"] == "X"] == [250_000, 500_000]


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        *((0, "0 ms"), (0.000_012_34, "12.3 µs"), (0.0123, "12.3 ms")),
        *((0.9996, "1000 ms"), (Fraction(7, 2), "3.5 s"), (1234.5, "1234 s")),
    ],
)
def test_times_are_written_in_the_unit_one_reads_them_in(duration_s, text):
    assert time_text(duration_s) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1536, "1.5 KiB"), (2**20, "1 MiB"), (5e13, "46566 GiB")],
)
def test_sizes_are_written_in_powers_of_1024(num_bytes, text):
    assert bytes_text(num_bytes) == text
