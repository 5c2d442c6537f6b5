"""Start the processes of a job on this machine, and see how each of them ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.warm import ROOT as ROOT
from tests.distributed.warm import Forked, origin

_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Ended:  # how one process ended; `code` is None if it had to be killed for taking too long
    rank: int
    code: int | None
    output: str


@dataclass(frozen=True, slots=True)
class Job:
    """Processes that run, each in a session of its own; they meet at a port that is held here."""

    processes: list["subprocess.Popen[str] | Forked"]
    port: socket.socket

    def wait(self, timeout_s: float, *, num_left: int = 0) -> list[Ended]:
        """Wait for all; kill those that do not end in time.  None but `num_left` that they started
        may live on, which are killed.
        """
        try:
            ended = self._wait(timeout_s)
        finally:
            self.port.close()
            sessions = {process.pid for process in self.processes}
            left = end_left(lambda folder: _session(folder) in sessions, num_left)
        assert len(left) == num_left, left
        return ended

    def _wait(self, timeout_s: float) -> list[Ended]:
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

    Modules (-m) and code (-c) run in processes that have imported torch already.
    """
    port = held_port()
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "recipes"))),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": number_of(port),
        "WORLD_SIZE": str(world_size),
        **(environment or {}),
    }
    ranks = range(world_size) if only is None else only
    own = {rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks}
    if arguments[0] in ("-m", "-c"):
        return Job([origin(rank).start(arguments, own[rank]) for rank in ranks], port)
    return Job([_started(arguments, own[rank]) for rank in ranks], port)


def _started(arguments: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    options: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE}
    options |= {"stderr": subprocess.STDOUT, "text": True, "cwd": ROOT, "start_new_session": True}
    command = [sys.executable, "-W", "error::UserWarning:penstock", *arguments]
    return subprocess.Popen(command, **options)


def run(
    world_size: int,
    arguments: Sequence[str],
    timeout_s: float = 100.0,
    environment: Mapping[str, str] | None = None,
) -> list[Ended]:
    ended = start(world_size, arguments, environment).wait(timeout_s)
    bad = [f"--- rank {e.rank}: {e.code}\n{e.output}" for e in ended if e.code != 0]
    assert not bad, "\n".join(bad)
    return ended


def begin_python(*arguments: str) -> Forked:
    """Begin `python -m ARGUMENTS`, or -c, in a process that has imported torch already."""
    return origin(0).start(arguments, dict(os.environ))


def run_python(*arguments: str) -> Ended:
    """Run that to its end; its output has what it wrote as errors, too."""
    process = begin_python(*arguments)
    try:
        output, _ = process.communicate(100.0)
    finally:
        process.kill()
    return Ended(0, process.returncode, output)


def left_behind(mark: str) -> dict[int, str]:
    """End what has `mark` in the environment that it was started with, and lives on."""
    return end_left(lambda folder: mark.encode() in (folder / "environ").read_bytes())


def end_left(is_ours: Callable[[Path], bool], num_expected: int = 0) -> dict[int, str]:
    """Give the processes, and their commands, that are ours by their folder in /proc, if after a
    while they are more than expected; they are killed.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while len(left := _found(is_ours)) > num_expected and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def _found(is_ours: Callable[[Path], bool]) -> dict[int, str]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile, or is another user's
            if is_ours(folder) and (command := (folder / "cmdline").read_bytes()):
                found[int(folder.name)] = command.replace(b"\0", b" ").decode()[:300]
    return found


def _session(folder: Path) -> int:
    return int((folder / "stat").read_text().rpartition(")")[2].split()[3])


def held_port() -> socket.socket:
    """Take a port that the system gives to nobody else until the socket is closed.

    It does not listen, so that whoever is told the number can (with SO_REUSEADDR, as stores do).
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def number_of(port: socket.socket) -> str:
    return str(port.getsockname()[1])
