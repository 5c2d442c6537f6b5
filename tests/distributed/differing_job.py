"""`penstock train`, with a seed of its own on each rank."""

import os
import sys

from penstock.cli.main import main

if __name__ == "__main__":
    main([*sys.argv[1:], "--set", f"pipeline.seed={os.environ['RANK']}"])
