"""Measure a card in a few minutes: graphs, processes, a GPT by Penstock and its peers, the tests
for GPUs, precisions, compiled layers, predictions beside steps.

    python -m benchmarks.gpu_campaign [--minutes 12] [--only PART ...] [--again]

Parts that are whole in the file of results are left out (`--again` runs them anew).  Each keeps
to its share of the minutes, and writes its rows as it goes.
"""

import argparse
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.gpu_campaign.contestants import Work
from benchmarks.gpu_campaign.measure import Row
from benchmarks.gpu_campaign.parts import (
    PARTS,
    ROOT,
    Found,
    measure,
    output,
    read,
    versions,
    write,
)
from benchmarks.report import Column, table_lines

GRACE_S = 70.0
"""Seconds after its share in which a part may end its last case; then it is killed."""
FORMS = {"ms": ",.2f", "s": ".1f", "gib": ".2f", "mib": ",.0f", "ratio": ".3f", "off": "+.1%"}
FORMS |= {"loss": ".4f"}
"""Formats of figures by the last word of their name."""


def run(part: str, work: Work, share_s: float, path: Path) -> None:
    """Run a part in a process; note it if that had to be killed, or failed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.gpu_campaign.parts"])
    process = context.Process(target=measure, args=(part, work, share_s, path))
    began = time.monotonic()
    process.start()
    process.join(share_s + GRACE_S)
    if process.exitcode is None:
        with suppress(ProcessLookupError):  # with all that it has started
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    if process.exitcode:
        rows = read(path).get(part, {}).get("rows", [])
        error = f"ended with {process.exitcode} after {time.monotonic() - began:.0f} s"
        write(path, {part: {"rows": [*rows, {"name": part, "error": error}], "is_whole": False}})


def table(found: Found) -> str:
    """Write the results as a page."""
    facts = "; ".join(f"{name} {value}" for name, value in found["versions"].items())
    lines = [f"# {found['name']}", "", f"{facts}; commit {found['commit']}; {found['date']}", ""]
    for part in (part for part in PARTS if part in found):
        rows = found[part]["rows"]
        lines += [f"## {part}", "", *table_lines(_columns(rows), [_in_line(r) for r in rows]), ""]
    return "\n".join(lines)


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Return a column for each key of any row; lists of single steps are in the JSON only."""
    cells = [(key, value) for row in rows for key, value in row.items()]
    keys = dict.fromkeys(key for key, v in cells if not isinstance(v, list | None))
    return [
        Column(key.replace("_", " "), key, FORMS.get(key.rpartition("_")[2], "")) for key in keys
    ]


def _in_line(row: Row) -> Row:
    """Cut texts to what a cell of a table holds."""
    return {k: " ".join(v.split())[:200] if isinstance(v, str) else v for k, v in row.items()}


def main(arguments: list[str] | None = None) -> None:
    """Run the parts, and write what each has found."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    options.add_argument("--minutes", type=float, default=12.0, help="for all parts together")
    options.add_argument("--only", choices=PARTS, nargs="+", help="run these parts")
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
    head = {"name": name, "date": date, "commit": chosen.commit or _commit()}
    write(path, head | {"versions": versions(device)})
    work = Work.smallest(device) if chosen.smallest else Work(device=device)
    parts = chosen.only or list(PARTS)
    whole = sum(PARTS[part].share for part in parts)
    for part in parts:
        if read(path).get(part, {}).get("is_whole") and not chosen.again:
            continue
        began = time.monotonic()
        run(part, work, 60 * chosen.minutes * PARTS[part].share / whole, path)
        path.with_suffix(".md").write_text(table(read(path)))
        print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
    print(table(read(path)))


def _commit() -> str:
    said = output(["git", "rev-parse", "--short", "HEAD"]).strip()
    return said if said.isalnum() and len(said) < 20 else "unknown"


if __name__ == "__main__":
    main()
