"""Solve many integer programs at once, in processes of their own.

Python runs one thread at a time, and much of a solution is Python.  A thread waits for a process
that imports no torch, and ends when its input does.

    submit ──► a thread ──► pickled call ──► python -m penstock.planner.solvers
    future ◄──────────────── pickled result ◄──┘
"""

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from .shared_cores import num_cores

_FEW = 32
"""Calls that run in threads: processes take longer to start than these to run."""
_MOST = 16
"""Processes, at most."""


class Solvers(ThreadPoolExecutor):
    """An executor of functions that a module holds, with as many processes as cores."""

    def __init__(self) -> None:
        super().__init__(min(num_cores(), _MOST))
        self._num_calls, self._of_thread = 0, threading.local()
        self._processes: list[Popen[bytes]] = []

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        """Run a function of these arguments; from so many calls on, in another process."""
        self._num_calls += 1
        if self._num_calls <= _FEW or not sys.executable:
            return super().submit(function, *arguments)
        return super().submit(self._elsewhere, function, arguments)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shutdown(cancel_futures=kind is not None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End all processes, after the calls that were submitted or without these."""
        super().shutdown(wait, cancel_futures=cancel_futures)
        for process in self._processes:
            process.kill()
            process.wait()
            for end in filter(None, (process.stdin, process.stdout)):
                end.close()

    def _elsewhere(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run a function in this thread's process, or here if that ends before it is done."""
        own = self._of_thread
        try:
            if not hasattr(own, "process"):
                own.process = _started()
                self._processes.append(own.process)
            pickle.dump((function, arguments), own.process.stdin)
            own.process.stdin.flush()
            return pickle.load(own.process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            vars(own).pop("process", None)
            return function(*arguments)  # raises here what it raised there


def _started() -> "Popen[bytes]":
    paths = os.pathsep.join(path or os.curdir for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-P", "-m", __name__]
    return Popen(words, env=environment, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)


def main() -> None:
    """Run the calls that come in, until none does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that waits decides what ends
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a solver prints is no result
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(function(*arguments), results)
        results.flush()


if __name__ == "__main__":
    main()
