"""How long models of usual sizes take until their first step: to capture, prove and balance."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Column, Load, Report, parser, progress

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("large.py")
NAMES = ("Swin-T", "MaxViT-T", "BERT, 12 blocks", "GPT-2, 12 blocks")

COLUMNS = (
    Column("model", "name"),
    Column("parameters", "parameters", ",.0f"),
    Column("first time: s", "first_s", ".1f"),
    Column("first step: s", "step_s", ".1f"),
)
BEFORE = (
    Column("before, first time: s", "before_first_s", ".1f"),
    Column("first time, of before", "first_ratio", ".2f"),
)


def measure(name: str, source: Path) -> dict[str, float]:
    """Run a model in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), name],
        env={**os.environ, "PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found | {"first_s": found["ready_s"]}


def run(options: argparse.Namespace) -> Report:
    """Measure every model, this version and the one before in turn."""
    load, rows = Load.now(), []
    for name in NAMES[:1] if options.smallest else NAMES:
        progress(name)
        now, before = [], []
        for _ in range(options.rounds):
            if options.against is not None:
                before.append(measure(name, options.against))
            now.append(measure(name, ROOT))
        row: dict[str, Any] = {"name": name} | _medians(now)
        if before:
            was = _medians(before)
            row["before_first_s"] = was["first_s"]
            row["first_ratio"] = row["first_s"] / was["first_s"]
        rows.append(row)
    columns = COLUMNS if options.against is None else COLUMNS + BEFORE
    settings = {"K": 2, "M": 4, "rounds": options.rounds, "load before": f"{load.before:.2f}"}
    return Report(columns, tuple(rows), settings, load.notes)


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {key: median(one[key] for one in found) for key in found[0]}


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=3, help="of each model")
    options.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="measure this one too, in turn"
    )
    chosen = options.parse_args(arguments)
    report = run(chosen)
    print(report)
    if chosen.json is not None:
        chosen.json.write_text(report.to_json() + "\n")


if __name__ == "__main__":
    main()
