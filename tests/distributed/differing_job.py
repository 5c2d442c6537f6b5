"""`penstock train` on ranks that do not have the same: the seed, or the version of Penstock.

python -m tests.distributed.differing_job WHAT train RECIPE ...
"""

import os
import sys

import penstock
from penstock.cli.main import main

if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "version":
        penstock.__version__ = f"0.0.{os.environ['RANK']}"
    else:
        arguments += ["--set", f"pipeline.seed={os.environ['RANK']}"]
    main(arguments)
