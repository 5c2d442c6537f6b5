"""What each process of a test in float64 runs: `penstock train ...`, told to end before a step.

    python -m tests.distributed.double_job STEP train RECIPE ...

Rank 0 is told before it trains step STEP; with 0 none is.
"""

import os
import sys

import torch

from penstock.cli.main import main
from tests.distributed.train_job import inject

if __name__ == "__main__":
    step, *arguments = sys.argv[1:]
    torch.set_default_dtype(torch.float64)
    if step != "0" and os.environ.get("RANK", "0") == "0":
        inject("term", int(step))
    main(arguments)
