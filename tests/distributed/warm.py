"""Processes that are forked from ones that have imported torch, which takes longer than most jobs.

    python -m tests.distributed.warm SOCKET

Ranks next to each other have different origins, so that they hash strings with different seeds, as
processes that are started one by one do: an order that differs between them must not go unseen.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[2]
_POLL_S = 0.01
_MOST_BYTES = 1 << 20


class Forked:  # a process that an origin has forked; it has what is needed of `subprocess.Popen`
    def __init__(self, pid: int, output: int, control: socket.socket) -> None:
        self.pid, self._output, self._control, self._said = pid, output, control, b""
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        """Give the exit status: negative, the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        if self.returncode is None:
            if not select.select([self._control], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self.returncode = int(self._control.recv(64))
            self._control.close()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Give all that it has written, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._output >= 0:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._output], [], [], left)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            part = os.read(self._output, _MOST_BYTES)
            self._said += part
            if not part:
                os.close(self._output)
                self._output = -1
        self.wait(5.0)
        return self._said.decode(), None

    def send_signal(self, number: int) -> None:
        """Signal it if it still runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Origin:  # a process that has imported torch, and forks
    def __init__(self) -> None:
        environment = {name: v for name, v in os.environ.items() if name != "PENSTOCK_TEST_CASE"}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.warm", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            env={
                **environment,
                "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "recipes"))),
                "OMP_NUM_THREADS": "1",
            },
            start_new_session=True,  # a signal to the tests' group leaves it time to end its own
        )
        theirs.close()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Forked:
        """Start `python -m MODULE ARGUMENTS`, or `-c CODE ARGUMENTS`, with this environment."""
        control, theirs = socket.socketpair()
        output, written = os.pipe()
        order = json.dumps({"arguments": list(arguments), "environment": dict(environment)})
        socket.send_fds(self._socket, [order.encode()], [theirs.fileno(), written])
        theirs.close()
        os.close(written)
        return Forked(int(control.recv(64)), output, control)


_ORIGINS: dict[int, Origin] = {}


def origin(rank: int) -> Origin:
    """Give the origin of a rank's processes: one of two, as each takes seconds to start.  It ends
    when this process does.
    """
    if rank % 2 not in _ORIGINS:
        _ORIGINS[rank % 2] = Origin()
    return _ORIGINS[rank % 2]


def _serve(orders: socket.socket) -> list[str]:
    """Fork whenever it is asked for; in what is forked, give what it is to run.

    In the origin it does not return.
    """
    running: dict[int, socket.socket] = {}
    while True:
        if not select.select([orders], [], [], _POLL_S)[0]:
            _tell_of_ended(running)
            continue
        message, descriptors, _, _ = socket.recv_fds(orders, _MOST_BYTES, 2)
        if not message:  # whoever asked has ended
            _end(running)
        order, pid = json.loads(message), os.fork()
        if pid == 0:
            break
        os.close(descriptors[1])
        running[pid] = socket.socket(fileno=descriptors[0])
        running[pid].send(str(pid).encode())
    for own in (orders, *running.values()):
        own.close()
    return _become(order, *descriptors)


def _end(running: Iterable[int]) -> NoReturn:
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _tell_of_ended(running: dict[int, socket.socket]) -> None:
    while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        with running.pop(ended[0]) as control, suppress(OSError):  # nobody may wait any more
            control.send(str(os.waitstatus_to_exitcode(ended[1])).encode())


def _become(order: Mapping[str, dict[str, str]], control: int, output: int) -> list[str]:
    os.close(control)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(order["environment"])
    return list(order["arguments"])


def main() -> None:
    import pytest  # noqa: F401 - all are imported for those that are forked
    import torch._dynamo  # noqa: F401 - as above; to make an optimizer imports it, for 2 s

    import penstock_recipes.train.command  # noqa: F401 - as above

    gc.collect()
    gc.freeze()  # or each that is forked copies and collects, at its end, all that is imported
    arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    warnings.filterwarnings("error", category=UserWarning, module=r"penstock\Z")
    sys.argv = arguments[1:]
    if arguments[0] == "-c":
        exec(compile(arguments[1], "-c", "exec"), vars(sys.modules["__main__"]))
    else:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
