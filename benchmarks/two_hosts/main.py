"""Where the time of a step goes when the two stages are on two hosts: compute, link, bubble."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.report import Column, Load, Report, counts, parser, progress, publish
from benchmarks.two_hosts.hosts import ADDRESSES, INTERFACE, NoHosts, TwoHosts, two_hosts
from benchmarks.two_hosts.rank import Work
from benchmarks.two_hosts.shares import (
    Computed,
    predicted_in_turn_s,
    predicted_s,
    shares,
)
from penstock import schedules

ROOT = Path(__file__).parents[2]
PORT = 29500
DEADLINE_S = 300.0
LINKS: dict[str, float | None] = {"unthrottled": None, "1 Gbit/s": 1e9, "100 Mbit/s": 100e6}
SMALLEST_LINKS = ("unthrottled", "100 Mbit/s")
SCHEDULES = ("gpipe", "one_f_one_b")
SMALLEST = Work(num_blocks=2, dim=16, num_heads=2, batch=4, tokens=8, steps=1)

COLUMNS = (
    Column("link", "link"),
    Column("it gave: Mbit/s", "link_mbit_per_s", ",.0f"),
    Column("µs", "link_latency_us", ",.0f"),
    Column("schedule", "schedule"),
    Column("M", "num_microbatches"),
    Column("ms a step", "ms", ".0f"),
    Column("compute", "compute", ".1%"),
    Column("communication", "communication", ".1%"),
    Column("bubble", "bubble", ".1%"),
    Column("MB there", "mb_there", ".2f"),
    Column("MB back", "mb_back", ".2f"),
    Column("simulated: ms", "simulated_ms", ".0f"),
    Column("link in turn: ms", "in_turn_ms", ".0f"),
)


class RankFailed(Exception):
    """A process on one of the hosts did not do its work."""


def run_ranks(hosts: TwoHosts, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Start a rank on each host, wait for both, and give what each measured.

    Raises:
        RankFailed: one failed, or took too long; what it wrote is in the message.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan_path = Path(folder) / "plan.json"
        plan_path.write_text(json.dumps(plan))
        results = [Path(folder) / f"{rank}.json" for rank in range(2)]
        processes = [_start(hosts, rank, plan_path, results[rank]) for rank in range(2)]
        try:
            _wait(processes)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        return [json.loads(path.read_text()) for path in results]


def _start(hosts: TwoHosts, rank: int, plan: Path, result: Path) -> "subprocess.Popen[str]":
    job = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, "-m", "benchmarks.two_hosts.rank", str(plan), str(result)]
    return subprocess.Popen(
        [*hosts.command(rank), *program],
        env={**os.environ, **job},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which then ends them
    )


def _wait(processes: "list[subprocess.Popen[str]]") -> None:
    deadline = time.monotonic() + DEADLINE_S
    for rank, process in enumerate(processes):
        try:
            _, said = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RankFailed(f"rank {rank} did not end within {DEADLINE_S:g} s") from None
        if process.returncode != 0:
            raise RankFailed(f"rank {rank} ended with {process.returncode}:\n{said}")


def row(
    link: str, setting: tuple[str, int], work: Work, results: list[dict[str, Any]], number: int
) -> dict[str, Any]:
    """Break down the median step of run `number`, which both ranks measured."""
    schedule_name, num_microbatches = setting
    runs = [result["runs"][number] for result in results]
    by_rank = [[step["step_s"] for step in r["steps"]] for r in runs]
    steps_s = [max(both) for both in zip(*by_rank, strict=True)]
    middle = sorted(range(len(steps_s)), key=steps_s.__getitem__)[len(steps_s) // 2]
    step_s = steps_s[middle]
    computed = [Computed(**r["steps"][middle]["computed"]) for r in runs]
    schedule = schedules.parse(runs[0]["schedule"])
    edges = results[0]["edges"]
    bytes_per_s = min(edge["bytes_per_s"] for edge in edges)
    latency_s = max(edge["latency_s"] for edge in edges)
    message_s = work.message_bytes(num_microbatches) / bytes_per_s
    return {
        "link": link,
        "link_mbit_per_s": bytes_per_s * 8 / 1e6,
        "link_latency_us": latency_s * 1e6,
        "schedule": schedule_name,
        "num_microbatches": num_microbatches,
        "ms": step_s * 1e3,
        **asdict(shares(schedule, computed, step_s)),
        "mb_there": runs[0]["sent_bytes"] / 1e6,
        "mb_back": runs[1]["sent_bytes"] / 1e6,
        "simulated_ms": predicted_s(schedule, computed, message_s, latency_s) * 1e3,
        "in_turn_ms": predicted_in_turn_s(schedule, computed, message_s, latency_s) * 1e3,
        "steps_s": steps_s,
        "computed": [asdict(c) for c in computed],
        "edges": edges,
    }


def run(options: argparse.Namespace) -> Report:
    """Measure every schedule and M over every link.

    Raises:
        NoHosts: two hosts cannot be made here.
        RankFailed: a process on one of them failed.
    """
    load = Load.now()
    work = SMALLEST if options.smallest else Work(steps=options.steps)
    all_counts: tuple[int, ...] = (2,) if options.smallest else options.num_microbatches
    settings = list(product(SCHEDULES, all_counts))
    plan = {"work": asdict(work), "settings": settings}
    rows = []
    with two_hosts() as hosts:
        for link in SMALLEST_LINKS if options.smallest else LINKS:
            progress(link)
            hosts.throttle(LINKS[link])
            results = run_ranks(hosts, plan)
            rows += [row(link, setting, work, results, n) for n, setting in enumerate(settings)]
    facts = {
        "K": 2,
        "steps": work.steps,
        "threads per stage": 1,
        "MB of activations a step": f"{work.message_bytes(1) / 1e6:.2f}",
        "load before": f"{load.before:.2f}",
    }
    return Report(COLUMNS, tuple(rows), facts, load.notes)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--steps", type=int, default=5, help="after one of warm-up")
    options.add_argument("--num-microbatches", type=counts, default=(8, 32), metavar="M,M,...")
    chosen = options.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts are removed
    try:
        publish(run(chosen), chosen, Path(__file__).parent)
    except (NoHosts, RankFailed) as reason:
        sys.exit(f"two_hosts: {reason}")
    except KeyboardInterrupt:
        progress("two_hosts: interrupted; both hosts are removed")
        sys.exit(130)


if __name__ == "__main__":
    main()
