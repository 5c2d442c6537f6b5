"""Memory of a traced step moves to the same instructions of a timed one."""

import pytest

from penstock.schedules import Backward, Forward
from penstock.trace.page.step import memory_moved
from penstock.trace.timeline import MemorySample, Span, Timeline

SPANS = (Span(0, Forward(0, 0), 0.0, 4.0), Span(0, Backward(0, 0), 6.0, 10.0))
TIMED = Timeline((Span(0, Forward(0, 0), 1.0, 2.0), Span(0, Backward(0, 0), 6.0, 7.0)))


@pytest.mark.parametrize(
    ("traced_s", "timed_s"),
    [(-1, 1.0), (0, 1.0), (2, 1.5), (4, 2.0), (5, 4.0), (8, 6.5), (10, 7.0), (12, 7.0)],
)
def test_a_sample_keeps_its_share_of_an_instruction(traced_s: float, timed_s: float) -> None:
    moved = memory_moved(Timeline(SPANS, (MemorySample(0, traced_s, 5),)), TIMED)
    assert moved is not None and moved.spans == TIMED.spans
    assert [(x.time_s, x.kept_bytes) for x in moved.memory] == [(timed_s, 5)]


def test_steps_of_other_instructions_are_not_mixed() -> None:
    assert memory_moved(Timeline(SPANS[:1]), TIMED) is None
