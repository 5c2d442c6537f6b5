"""Processes agree on a plan before anything is cut."""

from pathlib import Path

from penstock import Plan
from tests.distributed import plan_job
from tests.distributed.call import call
from tests.side_by_side import same_bits


def test_processes_run_the_plan_of_rank_0(tmp_path: Path) -> None:
    first, second = call(plan_job.work, (2, 1), tmp_path)
    assert first["plan"] == second["plan"]
    plan = Plan.from_json(first["plan"])
    assert (plan.placement.num_ranks, plan.threads_per_stage) == (2, 1)
    assert plan.predicted_s is not None
    for found in (first, second):
        assert found["gradients"]
        for name, gradient in found["gradients"].items():
            assert same_bits(gradient, found["again"][name]), name
        assert "do not agree on seed: 0 on rank 0; 1 on rank 1" in found["refused"]
