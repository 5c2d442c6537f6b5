"""Measure a card in a few minutes: versions, the tests for GPUs, a GPT by Penstock and its peers,
predictions beside steps.

    python -m benchmarks.gpu_campaign [--minutes 4] [--only PART] [--again]

Parts that are in the file of results already are left out (`--again` runs them anew), each keeps
to its share of the minutes, and the file and a table of it are written after each.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_campaign.contestants import Contest, Work
from benchmarks.report import Column, table_lines

ROOT = Path(__file__).parents[2]
COLUMNS = (
    Column("who", "name"),
    Column("step: ms", "step_ms", ".1f"),
    Column("of plain torch", "ratio", ".3f"),
    Column("peak of a step: MiB", "peak_mib", ",.0f"),
    Column("remark", "remark"),
)
Found = dict[str, Any]


class Campaign:
    """What is measured where; `share_s` is how long a part may take."""

    def __init__(self, device: torch.device, share_s: float, *, smallest: bool) -> None:
        self.device, self.share_s, self.smallest = device, share_s, smallest

    def versions(self) -> Found:
        """Say what is installed, and which card is here."""
        found: Found = {"python": platform.python_version(), "torch": torch.__version__}
        if self.device.type == "cuda":
            at = torch.cuda.get_device_properties(self.device)
            found |= {"card": at.name, "memory MiB": at.total_memory >> 20}
            found |= {"cuda": torch.version.cuda, "nccl": list(torch.cuda.nccl.version())}
            asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            found["driver"] = _output(asked).strip()
        return found

    def tests(self) -> Found:
        """Run the tests for GPUs; their child processes find all that this one can import."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += ["--maxfail", "5", "-m", "slow or not slow", "tests/gpu"]
        said = _output(command, self.share_s)
        lines = said.strip().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return {"said": lines[-1] if lines else "", "failed": failed}

    def throughput(self) -> Found:
        """Train a GPT in plain torch, by Penstock and by its peers, in rounds."""
        until = time.monotonic() + self.share_s
        work = Work.smallest(self.device) if self.smallest else Work(device=self.device)
        contest = Contest(work)
        contest.run(until)
        contest.measure_memory()
        contest.close()
        rounds = len(contest.seconds.get("plain torch", []))
        return {"rounds": rounds, "rows": list(contest.rows())}

    def foresight(self) -> Found:
        """Predict steps, and measure them."""
        command = [sys.executable, "-m", "benchmarks.foresight.gpu"]
        said = _output([*command, "--smallest"] if self.smallest else command, self.share_s)
        lines = said.splitlines()
        return {"table": [s for s in lines if s.startswith("|")], "said": lines[-12:]}


PARTS: dict[str, tuple[Callable[[Campaign], Found], float]] = {
    "versions": (Campaign.versions, 0.0),
    "throughput": (Campaign.throughput, 0.35),
    "tests": (Campaign.tests, 0.35),
    "foresight": (Campaign.foresight, 0.3),
}
"""What runs in this order, with its share of the minutes."""


def _output(command: list[str], timeout_s: float | None = None) -> str:
    """Return what a command prints; it finds all modules that this process does."""
    paths = os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, sys.path)]))
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        return "not installed"
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
        text = said.decode() if isinstance(said, bytes) else said
        return f"{text}\nended after {timeout_s:.0f} s"
    return done.stdout


def table(found: Found) -> str:
    """Write the results as a page."""
    facts = "; ".join(f"{name} {value}" for name, value in found.get("versions", {}).items())
    lines = [f"# {found['name']}", "", f"{facts}; commit {found['commit']}; {found['date']}", ""]
    if "throughput" in found:
        rounds, rows = found["throughput"]["rounds"], found["throughput"]["rows"]
        lines += [f"Medians of {rounds} rounds:", "", *table_lines(COLUMNS, rows), ""]
    if "tests" in found:
        lines += ["Tests for GPUs: " + found["tests"]["said"], *found["tests"]["failed"], ""]
    if "foresight" in found:
        lines += [*found["foresight"]["table"], ""]
    return "\n".join(lines)


def _commit() -> str:
    said = _output(["git", "rev-parse", "--short", "HEAD"]).strip()
    return said if said.isalnum() and len(said) < 20 else "unknown"


def main(arguments: list[str] | None = None) -> None:
    """Run the parts, and write what each has found."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    options.add_argument("--minutes", type=float, default=4.0, help="for all parts together")
    options.add_argument("--only", choices=PARTS, help="run one part")
    options.add_argument("--again", action="store_true", help="run parts that are done, too")
    options.add_argument("--smallest", action="store_true", help="a tiny model")
    options.add_argument("--device", default="cuda:0", help="the card, or cpu")
    options.add_argument("--commit", help="what is measured; default: what git says")
    options.add_argument("--folder", type=Path, default=ROOT / "results" / "gpu_campaign")
    chosen = options.parse_args(arguments)
    device = torch.device(chosen.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        options.error("this torch sees no GPU; --device cpu --smallest shows that it runs")
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    name = f"{card.lower().replace(' ', '-')}-{date}"
    chosen.folder.mkdir(parents=True, exist_ok=True)
    path = chosen.folder / f"{name}.json"
    found: Found = json.loads(path.read_text()) if path.exists() else {}
    found |= {"name": name, "date": date, "commit": chosen.commit or _commit()}
    for part, (measure, share) in PARTS.items():
        if (chosen.only or part) != part or (part in found and not chosen.again):
            continue
        share_s = 60 * chosen.minutes * (1.0 if chosen.only else share)
        began = time.monotonic()
        try:
            found[part] = measure(Campaign(device, share_s, smallest=chosen.smallest))
        except Exception as error:  # the other parts are worth their minutes all the same
            print(f"{part} failed: {type(error).__name__}: {error}", flush=True)
            continue
        path.write_text(json.dumps(found, indent=1))
        path.with_suffix(".md").write_text(table(found))
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
