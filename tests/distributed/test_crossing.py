"""Pipelines that share a mesh are never mixed: a call names the pipeline that it is for."""

from pathlib import Path

import pytest

from tests.distributed import crossing_job
from tests.distributed.call import call

WORDS = {"step": "train_step", "evaluate": "eval_step", "clip": "clip_grad_norm_"}
WORDS |= {"unscale": "GradScaler", "save": "save_checkpoint"}
WORDS |= {"share_out": "zero_optimizer", "move": "step of zero_optimizer"}
PAIRS = {
    (2, 1): [("step", "step"), ("clip", "clip"), ("unscale", "evaluate"), ("save", "step")],
    (1, 2): [("step", "step"), ("share_out", "share_out"), ("move", "move"), ("move", "step")],
}
"""What is done by rank 0 and by rank 1, for each number of stages and replicas."""


@pytest.mark.parametrize("layout", PAIRS)
def test_a_call_for_another_pipeline_is_refused_everywhere_and_names_both(
    layout: tuple[int, int], tmp_path: Path
) -> None:
    pairs = PAIRS[layout]
    by_rank = call(crossing_job.all_of_them, layout, tmp_path, pairs=pairs)
    for pair, *found in zip(pairs, *by_rank, strict=True):
        for error, is_unchanged in found:
            layers = f"({layout[0]} layers, {12 * layout[0]} parameters)"
            for rank, name in enumerate(pair):
                assert f"rank {rank} began {WORDS[name]} of pipeline {rank} {layers}" in error
            assert error.startswith("MeshError")
            assert is_unchanged or "unscale" in pair  # which divides before it asks the others


def test_pipelines_made_in_another_order_and_inputs_without_values_are_refused(
    tmp_path: Path,
) -> None:
    (first_order, first), (second_order, second) = call(
        crossing_job.refused, (2, 1), tmp_path, ends_well=False
    )
    for error in (first_order, second_order):
        assert "number of pipelines made before: 1 on rank 0; 0 on rank 1" in error
    said = "inputs hold a tensor of shape (4, 3) on the meta device, which has no values"
    assert first.startswith(f"BatchError: {said}")
    assert second.startswith(f"PeerError: rank 0 (stage 0) failed: BatchError: {said}")
