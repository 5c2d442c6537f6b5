"""Processes end at the same step, whenever a signal comes."""

import signal
from pathlib import Path

from penstock.train.run_folder import RunFolder
from tests.distributed.launch import ROOT, start

CHANGES = (
    "model.num_blocks=1",
    "model.width=4",
    "train.epochs=2",
    "train.batch_size=500",
    "learning_rate.warmup_epochs=1",
)
"""Six steps."""


def test_a_signal_that_one_process_gets_after_all_agreed_counts_a_step_later(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path / "run")
    words = [word for change in CHANGES for word in ("--set", change)]
    command = ["train", str(ROOT / "recipes" / "digits.toml"), *words]
    job = ["-m", "tests.distributed.late_signal_job", "2"]
    ended = start(2, [*job, *command, "--run-folder", str(folder.path)]).wait(60)
    for process in ended:
        assert process.code == 128 + signal.SIGTERM, process.output
    assert "everything is saved" in ended[0].output
    assert folder.checkpoints() == [folder.checkpoint_path(2)]
