"""Print the files, lines and functions that one training step enters: what a reader has to read.

    python -m scripts.step_reach              Penstock: K = 2, M = 2, threads, recompute
    python -m scripts.step_reach torchgpipe   the same of torchgpipe, where it is installed

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
    """Count what the package named by the first argument enters, and print it as a table."""
    name = sys.argv[1] if len(sys.argv) > 1 else "penstock"
    folder = Path(importlib.import_module(name).__file__ or "").parent
    make_step = {"penstock": penstock_step, "torchgpipe": torchgpipe_step}[name]
    entered = [code for code in functions_entered(make_step) if within(code, folder)]
    files = Counter(Path(code.co_filename) for code in entered)
    lines = {path: len(path.read_text().splitlines()) for path in files}
    for path in sorted(files, key=lambda path: -lines[path]):
        print(f"{lines[path]:6} lines {files[path]:4} functions  {path.relative_to(folder)}")
    print(f"{len(files)} files, {sum(lines.values()):,} lines, {len(entered)} functions of {name}")


def within(code: CodeType, folder: Path) -> bool:
    """Tell whether a function was written in a file of `folder`, and not made by a library."""
    return Path(code.co_filename).is_relative_to(folder)


def functions_entered(make_step: Callable[[], Callable[[], object]]) -> set[CodeType]:
    """Return the code of all functions that the second call of a step enters, in all threads."""
    entered: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.add(frame.f_code)

    threading.setprofile(note)  # of the threads that the first call starts
    step = make_step()
    step()
    sys.setprofile(note)
    entered.clear()
    step()
    sys.setprofile(None)
    threading.setprofile(None)
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


if __name__ == "__main__":
    main()
