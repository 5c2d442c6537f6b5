"""A traced step's timeline holds all stages, whichever process is asked for it."""

from pathlib import Path

import pytest

from penstock.schedules.ir import ReceiveActivation, ReceiveGradient, awaited_message, sent_message
from penstock.trace.timeline import Timeline
from tests.distributed import trace_job
from tests.distributed.call import call


def check_whole(timeline: Timeline, stages: int, *, memory: bool) -> None:
    """See that it is one step of all stages, in an order that can have been."""
    assert timeline.num_ranks == stages
    assert all(span.rank == span.instruction.stage for span in timeline.spans)
    assert min(span.start_s for span in timeline.spans) == 0.0
    assert all(span.duration_s >= 0 for span in timeline.spans)
    sent_s = {sent_message(span.instruction): span.start_s for span in timeline.spans}
    received = [
        span
        for span in timeline.spans
        if isinstance(span.instruction, ReceiveActivation | ReceiveGradient)
    ]
    assert len(received) == 2 * 3 * (stages - 1)
    for span in received:
        assert span.end_s > sent_s[awaited_message(span.instruction)]
    breakdown = timeline.breakdown()
    assert [row.stage for row in breakdown.stages] == list(range(stages))
    assert breakdown.num_microbatches == 3
    total_s = sum(row.busy_s + row.wait_s + row.bubble_s for row in breakdown.stages)
    assert total_s == pytest.approx(stages * timeline.step_s)
    assert set(timeline.peak_bytes()) == (set(range(stages)) if memory else set())


@pytest.mark.parametrize(
    ("stages", "replicas"), ((2, 1), (3, 1), pytest.param(2, 2, marks=pytest.mark.slow))
)
def test_every_process_has_the_timeline_of_all_stages_of_its_replica(
    stages: int, replicas: int, tmp_path: Path
) -> None:
    by_rank = call(trace_job.work, (stages, replicas), tmp_path)
    for found in by_rank:
        twins = [other for other in by_rank if other["replica"] == found["replica"]]
        assert len(twins) == stages
        assert all(other == found for other in twins), "one clock: one timeline, to the bit"
        timed, quiet, measured, mixed, quiet_again = found["timelines"]
        assert found["under_callers_hooks"]
        assert quiet is None
        assert quiet_again is None
        check_whole(Timeline.from_json(timed), stages, memory=False)
        check_whole(Timeline.from_json(measured), stages, memory=True)
        check_whole(Timeline.from_json(mixed), stages, memory=True)
    assert len({str(found["timelines"]) for found in by_rank}) == replicas
