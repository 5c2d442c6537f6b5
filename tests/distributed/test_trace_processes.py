"""A traced step's timeline holds all stages, whichever process is asked for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import penstock
from penstock.schedules.ir import ReceiveActivation, ReceiveGradient, awaited_message, sent_message
from penstock.trace.timeline import Timeline
from tests.distributed.call import call


def timelines(mesh: penstock.Mesh, choices: list[list[str]]) -> list[str | None]:
    """Train one step for each row of choices, one for each rank; give the timelines as JSON."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"mesh": mesh, "num_microbatches": 3, "threads_per_stage": 1}
    pipe = penstock.Pipeline(
        [nn.Linear(4, 4) for _ in range(mesh.num_stages)], loss=nn.MSELoss(), **options
    )
    found: list[Timeline | None] = []
    for row in choices:
        pipe.trace = penstock.Trace(row[mesh.rank])
        pipe.train_step(torch.randn(6, 4), torch.randn(6, 4))
        pipe.eval_step(torch.randn(5, 4))
        found.append(pipe.last_timeline)
        assert pipe.trace is penstock.Trace(row[mesh.rank])
    return [None if timeline is None else timeline.to_json() for timeline in found]


def work(mesh: penstock.Mesh) -> dict[str, Any]:
    """Trace alike, and each rank in another way; count what passes hooks of the caller's."""
    size = mesh.world_size
    strongest_last = ["off"] * (size - 1) + ["memory"]
    rows = [["time"] * size, ["off"] * size, ["memory"] * size, strongest_last, ["off"] * size]
    packed: list[None] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(None)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        found = timelines(mesh, rows)
    return {"timelines": found, "replica": mesh.replica, "under_callers_hooks": bool(packed)}


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
    ("stages", "replicas"),
    ((2, 1), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((3, 1), (2, 2)))),
)
def test_every_process_has_the_timeline_of_all_stages_of_its_replica(
    stages: int, replicas: int, tmp_path: Path
) -> None:
    by_rank = call(work, (stages, replicas), tmp_path)
    for found in by_rank:
        twins = [other for other in by_rank if other["replica"] == found["replica"]]
        assert len(twins) == stages
        assert all(other == found for other in twins), "one clock: one timeline, to the bit"
        timed, quiet, measured, mixed, quiet_again = found["timelines"]
        assert found["under_callers_hooks"] and quiet is None and quiet_again is None
        check_whole(Timeline.from_json(timed), stages, memory=False)
        check_whole(Timeline.from_json(measured), stages, memory=True)
        check_whole(Timeline.from_json(mixed), stages, memory=True)
    assert len({str(found["timelines"]) for found in by_rank}) == replicas
