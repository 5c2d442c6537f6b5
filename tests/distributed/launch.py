"""Start the processes of a job on this machine, and see how each of them ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.warm import ROOT as ROOT
from tests.distributed.warm import Forked, origin


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process ended; `code` is None if it had to be killed for taking too long."""

    rank: int
    code: int | None
    output: str


@dataclass(frozen=True, slots=True)
class Job:
    """Processes that run."""

    processes: list["subprocess.Popen[str] | Forked"]

    def wait(self, timeout_s: float) -> list[Ended]:
        """Wait for all; kill those that do not end in time."""
        deadline = time.monotonic() + timeout_s
        ended = []
        for rank, process in enumerate(self.processes):
            try:
                output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                ended.append(Ended(rank, process.returncode, output))
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
                ended.append(Ended(rank, None, output))
        return ended


def start(
    world_size: int,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    only: Sequence[int] | None = None,
) -> Job:
    """Start `python ARGUMENTS` once for each rank, as torchrun would, or for some ranks `only`.

    Modules (-m) run in processes that have imported torch already.
    """
    port = free_port()
    common = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        **(environment or {}),
    }
    ranks = range(world_size) if only is None else only
    own = {rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks}
    if arguments[0] == "-m":
        return Job([origin(rank).start(arguments, own[rank]) for rank in ranks])
    return Job([_started(arguments, own[rank]) for rank in ranks])


def _started(arguments: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-W", "error::UserWarning:penstock", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


def run(
    world_size: int,
    arguments: Sequence[str],
    timeout_s: float = 100.0,
    environment: Mapping[str, str] | None = None,
) -> list[Ended]:
    """Run a job that must end well."""
    ended = start(world_size, arguments, environment).wait(timeout_s)
    bad = [f"--- rank {e.rank}: {e.code}\n{e.output}" for e in ended if e.code != 0]
    assert not bad, "\n".join(bad)
    return ended


def left_behind(mark: str, timeout_s: float) -> dict[int, str]:
    """Give the processes, and their commands, that have `mark` in their environment and do not end
    in time; they are killed.
    """
    deadline = time.monotonic() + timeout_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def marked(mark: str) -> dict[int, str]:
    """Find the processes that were started with `mark` in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if mark.encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(folder.name)] = command[:300]
    return found


def free_port() -> int:
    """Find a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
