"""Captured models have the same bits with a process for each stage."""

from pathlib import Path

import pytest

from penstock.model.capture.inputs import EVERYWHERE, ROUTED
from tests.distributed import capture_job
from tests.distributed.call import call
from tests.model.capture.any_models.lists import OTHERS, REQUIRED
from tests.model.capture.any_models.odd import CHAINS

FEW = [
    "gpt2",
    "t5",
    "unet",
    "branching",
    "NumPy between blocks",
    "parameters between blocks",
    "a checkpoint around a tied block",
]
INPUTS = pytest.mark.parametrize("inputs", [ROUTED, EVERYWHERE])


@INPUTS
def test_captured_models_in_two_processes(inputs: str, tmp_path: Path) -> None:
    call(capture_job.train_all, (2, 1), tmp_path, names=FEW, inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize(("num_stages", "inputs"), [(2, EVERYWHERE), (3, ROUTED), (4, ROUTED)])
def test_required_models_in_processes(num_stages: int, inputs: str, tmp_path: Path) -> None:
    names = [model.name for model in REQUIRED]
    layout = (num_stages, 1)
    call(capture_job.train_all, layout, tmp_path, timeout_s=600.0, names=names, inputs=inputs)


@pytest.mark.slow
@INPUTS
def test_other_models_in_processes(inputs: str, tmp_path: Path) -> None:
    names = [model.name for model in (*OTHERS, *CHAINS)]
    call(capture_job.train_all, (2, 1), tmp_path, timeout_s=600.0, names=names, inputs=inputs)


@pytest.mark.slow
def test_four_processes_move_what_lives_at_the_cuts(tmp_path: Path) -> None:
    call(capture_job.check_bytes, (4, 1), tmp_path)


@pytest.mark.slow
def test_an_exported_model_in_processes(tmp_path: Path) -> None:
    call(capture_job.train_exported, (2, 1), tmp_path)


def test_a_tied_weight_is_one_to_norms_optimizers_and_checkpoints(tmp_path: Path) -> None:
    call(capture_job.tied_weights_are_one, (3, 1), tmp_path, where=str(tmp_path))
