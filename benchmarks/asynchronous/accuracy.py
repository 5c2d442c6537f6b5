"""What weights that lag cost in accuracy on handwritten digits: a few epochs with each schedule.

python -m benchmarks.asynchronous.accuracy
"""

import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.report import progress
from penstock.train.command import Request, start_run
from penstock.train.interrupt import Interrupt

RECIPE = Path("recipes/digits.toml")
ALIKE = (
    "train.epochs=6",
    "train.batch_size=64",
    "pipeline.num_microbatches=4",
    "pipeline.partition=[7, 4]",
    "pipeline.recompute=never",
)
WAYS = {
    "one_f_one_b": ["pipeline.schedule=one_f_one_b"],
    "pipedream_2bw": ["pipeline.schedule=pipedream_2bw", "train.window=22"],
    "pipedream": ["pipeline.schedule=pipedream", "train.window=22"],
}
SEEDS = (0, 1)


def accuracy(way: str, seed: int) -> float:
    """Train with a schedule; give the share of the unseen digits that are read."""
    with tempfile.TemporaryDirectory() as folder:
        changes = [*ALIKE, *WAYS[way], f"train.seed={seed}"]
        request = Request(RECIPE, changes, Path(folder) / "run")
        return start_run(request, Console(quiet=True), Interrupt()).scores["test_accuracy"]


def main() -> None:
    """Train with every schedule and seed; print a table."""
    print("| schedule | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " |")
    print("|---" * (1 + len(SEEDS)) + "|")
    for way in WAYS:
        progress(f"training with {way}")
        found = [accuracy(way, seed) for seed in SEEDS]
        print(f"| `{way}` | " + " | ".join(f"{share:.1%}" for share in found) + " |", flush=True)


if __name__ == "__main__":
    main()
