"""What each process of a training test runs: `penstock train ...`, with a fault at one step.

    python -m tests.distributed.train_job ACTION RANK STEP train RECIPE ...

In the first attempt, process RANK kills itself, is stopped, raises or is told to end (term) before
it trains step STEP; or its parent, torchrun, is killed with it (lose); or it is killed after the
newest checkpoint was damaged and the recipe edited (damage); or it is told to end just after it
told the others to go on, in the agreement of number STEP, of which 0 is before the first step
(late); or it has a seed (seed) or a version of Penstock (version) of its own.  With "double "
before the action, all compute in float64.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

import penstock
from penstock.cli.main import main
from penstock.mesh.control import Control
from penstock_recipes.train.display import Display
from penstock_recipes.train.loop import Trainer
from penstock_recipes.train.run_folder import RunFolder

PARENT = os.getppid()
"""As it was at first: the next process to be lost has another parent once torchrun is gone."""


def go_wrong(action: str) -> None:
    match action:
        case "raise":
            raise ValueError("injected")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "damage":
            Path("mine.toml").write_text(Path("mine.toml").read_text().replace("0.005", "0.05"))
            folder = RunFolder(Path("runs/mine-1"))
            while not (newest := folder.checkpoint_path(4)).is_dir():
                time.sleep(0.1)  # it is being written
            next(newest.rglob("*.safetensors")).write_bytes(b"")
            os.kill(os.getpid(), signal.SIGKILL)
        case "lose":
            os.kill(PARENT, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def inject(action: str, step: int) -> None:
    """Let the trainer of this process go wrong at a step."""
    train = Trainer._step

    def faulty(self: Trainer, folder: RunFolder, display: Display) -> None:
        if self.position.step == step - 1:
            go_wrong(action)
        train(self, folder, display)

    Trainer._step = faulty  # type: ignore[method-assign]


def inject_late(agreement: int) -> None:
    """Let this process get the signal during the agreement of that number."""
    highest, left = Control.highest, iter([*[False] * agreement, True])

    def late(self: Control, value: int, purpose: str) -> int:
        found = highest(self, value, purpose)
        if purpose == "for the others to finish their step" and next(left, False):
            go_wrong("term")
        return found

    Control.highest = late  # type: ignore[method-assign]


if __name__ == "__main__":
    words, ranks, step, *arguments = sys.argv[1:]
    *double, action = words.split()
    if double:
        torch.set_default_dtype(torch.float64)
    rank = os.environ.get("RANK", "0")
    is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first_attempt and rank in ranks.split(","):
        match action:
            case "late":
                inject_late(int(step))
            case "seed":
                arguments += ["--set", f"pipeline.seed={rank}"]
            case "version":
                penstock.__version__ = f"0.0.{rank}"
            case _:
                inject(action, int(step))
    main(arguments)
