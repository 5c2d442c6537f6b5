"""Captured models have the same bits with a process for each stage."""

from pathlib import Path

import pytest

from tests.any_models import REQUIRED
from tests.distributed import capture_job
from tests.distributed.call import call

FEW = ["gpt2", "t5", "unet", "branching"]


def test_captured_models_in_two_processes(tmp_path: Path) -> None:
    call(capture_job.train_all, (2, 1), tmp_path, names=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_all_captured_models_in_processes(num_stages: int, tmp_path: Path) -> None:
    names = [model.name for model in REQUIRED]
    call(capture_job.train_all, (num_stages, 1), tmp_path, names=names)


def test_four_processes_move_what_lives_at_the_cuts(tmp_path: Path) -> None:
    call(capture_job.check_bytes, (4, 1), tmp_path)


@pytest.mark.slow
def test_an_exported_model_in_processes(tmp_path: Path) -> None:
    call(capture_job.train_exported, (2, 1), tmp_path)
