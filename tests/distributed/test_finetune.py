"""The guide's script runs as it is, under python and under torchrun, with the same losses."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALONE = [sys.executable]
TOGETHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def losses(program: list[str]) -> list[str]:
    script = ["docs/finetune_gpt2.py", "LICENSE", "20"]
    done = subprocess.run(
        [*program, *script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step")]


@pytest.mark.slow
def test_the_guides_script_trains_alike_in_one_process_and_in_two() -> None:
    alone = losses(ALONE)
    assert alone and alone == losses(TOGETHER)
