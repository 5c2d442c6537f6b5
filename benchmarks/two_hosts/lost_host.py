"""How long each process needs to end when the link between two hosts goes down.

    alpha                          beta
    ranks 0 ... P - 1  ◄── x ──►  ranks P ... 2 P - 1

python -m benchmarks.two_hosts.lost_host [--timeout SECONDS] [--per-host P] [--num-replicas D]
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from benchmarks.two_hosts.hosts import ADDRESSES, INTERFACE, NoHosts, TwoHosts, two_hosts

ROOT = Path(__file__).parents[2]
PORT = 29500
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended; `seconds` after the link went down, None if it had to be killed."""

    rank: int
    address: str
    seconds: float | None
    said: str


def lose_a_host(
    hosts: TwoHosts, per_host: int = 2, num_replicas: int = 1, timeout_s: float = 600.0
) -> list[Ended]:
    """Start a job on both hosts, take the link down once it trains, and see every process end."""
    arguments = [str(num_replicas), str(timeout_s)]
    processes = [_start(hosts, rank, per_host, arguments) for rank in range(2 * per_host)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "trains\n", process.communicate()[1]
        hosts.cut_off(1)
        return _ends(processes, per_host)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start(
    hosts: TwoHosts, rank: int, per_host: int, arguments: list[str]
) -> "subprocess.Popen[str]":
    job = {
        "RANK": str(rank),
        "WORLD_SIZE": str(2 * per_host),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }
    program = [sys.executable, "-m", "benchmarks.two_hosts.steps", *arguments]
    return subprocess.Popen(
        [*hosts.command(rank // per_host), *program],
        env={**os.environ, **job},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _ends(processes: "list[subprocess.Popen[str]]", per_host: int) -> list[Ended]:
    began, found = time.monotonic(), {}

    def wait(rank: int, process: "subprocess.Popen[str]") -> None:
        try:
            _, said = process.communicate(timeout=PATIENCE_S)
            seconds: float | None = time.monotonic() - began
        except subprocess.TimeoutExpired:
            seconds, said = None, "did not end"
        found[rank] = Ended(rank, ADDRESSES[rank // per_host], seconds, said.strip())

    threads = [Thread(target=wait, args=each) for each in enumerate(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(processes))]


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    options.add_argument("--per-host", type=int, default=2, metavar="P")
    options.add_argument("--num-replicas", type=int, default=1, metavar="D")
    chosen = options.parse_args()
    try:
        with two_hosts() as hosts:
            ended = lose_a_host(hosts, chosen.per_host, chosen.num_replicas, chosen.timeout)
    except NoHosts as reason:
        sys.exit(f"lost_host: {reason}")
    for process in ended:
        took = "never" if process.seconds is None else f"{process.seconds:.1f} s"
        print(f"rank {process.rank} on {process.address}: {took}: {process.said}")


if __name__ == "__main__":
    main()
