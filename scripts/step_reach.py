"""Print the files, lines and functions that one call enters: what a reader has to read.

    python -m scripts.step_reach              a training step of Penstock: K = 2, M = 2, threads,
                                              recompute
    python -m scripts.step_reach plan         penstock.plan of a saved profile of 8 layers
    python -m scripts.step_reach torchgpipe   the step of torchgpipe, where it is installed

The step is not the pipeline's first, which also measures, cuts and lowers.  Lines are those of
the whole files.
"""

import importlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import penstock


def main() -> None:
    """Count what the call named by the first argument enters, and print it as a table."""
    name = sys.argv[1] if len(sys.argv) > 1 else "step"
    files, lines = reach(name)
    for path in sorted(files, key=lambda path: -lines[path]):
        print(f"{lines[path]:6} lines {files[path]:4} functions  {path}")
    functions = sum(files.values())
    print(f"{len(files)} files, {sum(lines.values()):,} lines, {functions} functions")


def reach(name: str) -> tuple[dict[Path, int], dict[Path, int]]:
    """Return how many functions of each file a call enters, and the lines of the whole file."""
    package, make_call = CALLS[name]
    folder = Path(importlib.import_module(package).__file__ or "").parent
    entered = [code for code in functions_entered(make_call) if within(code, folder)]
    files = Counter(Path(code.co_filename).relative_to(folder) for code in entered)
    return files, {path: len((folder / path).read_text().splitlines()) for path in files}


def within(code: CodeType, folder: Path) -> bool:
    """Tell whether a function was written in a file of `folder`, and not made by a library."""
    return Path(code.co_filename).is_relative_to(folder)


def functions_entered(make_step: Callable[[], Callable[[], object]]) -> set[CodeType]:
    """Return the code of all functions that the second call of a step enters, in all threads."""
    entered: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:  # and its lines are not traced
        entered.add(frame.f_code)

    threading.settrace(note)  # of the threads that the first call starts
    step = make_step()
    step()
    sys.settrace(note)
    entered.clear()
    step()
    sys.settrace(None)
    threading.settrace(None)
    return entered


def layers() -> nn.Sequential:
    """Return a chain of four layers."""
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4))


def penstock_step() -> Callable[[], object]:
    """Return a training step of a pipeline of 2 stages and 2 micro-batches in threads."""
    pipe = penstock.Pipeline(
        layers(), num_stages=2, num_microbatches=2, loss=nn.functional.mse_loss
    )
    inputs, targets = torch.randn(4, 8), torch.randn(4, 4)
    return lambda: pipe.train_step(inputs, targets)


def torchgpipe_step() -> Callable[[], object]:
    """Return the same of torchgpipe: forward, loss and backward."""
    torchgpipe = importlib.import_module("torchgpipe")
    pipe = torchgpipe.GPipe(layers(), balance=[2, 2], devices=["cpu", "cpu"], chunks=2)
    inputs, targets = torch.randn(4, 8), torch.randn(4, 4)
    return lambda: nn.functional.mse_loss(pipe(inputs), targets).backward()


def plan_call() -> Callable[[], object]:
    """Return a call of `penstock.plan` for a host of eight H100."""
    with torch.device("meta"):
        blocks = [
            nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0) for _ in range(8)
        ]
        inputs = torch.empty(2, 16, 64)
    profile = penstock.profile(blocks, inputs, measure=False, microbatch_sizes=[1, 2])
    cluster = penstock.Cluster.load("dgx-h100")
    saved = penstock.Profile.from_json(profile.to_json())  # without operators
    return lambda: penstock.plan(saved, cluster, batch_size=16)


CALLS = {
    "step": ("penstock", penstock_step),
    "plan": ("penstock", plan_call),
    "torchgpipe": ("torchgpipe", torchgpipe_step),
}


if __name__ == "__main__":
    main()
