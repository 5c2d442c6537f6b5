"""Contestants whose stages are processes: alive the whole run, idle between their steps.

this process      step "torch Schedule1F1B", M = 8          the slower one's seconds
                       │                  │                    ▲            ▲
one for each stage     0 ── barrier ───── 1 ── zero_grad, step ┴────────────┘
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy
import torch
from torch import distributed as dist
from torch import multiprocessing, nn

from benchmarks.throughput.contestants import NUM_STAGES, Gradients, gradients_of

ANSWER_S = 120.0
"""A process that has not answered by then hangs."""
Key = tuple[str, int]
"""A contestant's name and its number of micro-batches."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process's part of a contestant.

    `run_step` is timed: zero_grad and a training step.  `layers` are those that the process
    trains, by their place in the model.
    """

    run_step: Callable[[], Any]
    layers: Mapping[int, nn.Module]


_Work = TypeVar("_Work")
Prepare = Callable[[int, _Work, tuple[int, ...]], dict[Key, Part]]
"""(rank, work, numbers of micro-batches) -> what this process can be asked to run."""


class Processes:
    """The processes of one peer; each waits for an order, and answers it.

    Args:
        prepare: what each process calls first; it finds torchrun's environment variables, and
            joins the others by them.

    Raises:
        RuntimeError: a process cannot do its part, has ended, or hangs.
    """

    def __init__(
        self,
        prepare: Prepare[_Work],
        work: _Work,
        counts: tuple[int, ...],
        num_processes: int = NUM_STAGES,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self._processes, self._pipes = [], []
        for rank in range(num_processes):
            ours, theirs = context.Pipe()
            place = (rank, num_processes, port)
            process = context.Process(
                target=_serve, args=(place, prepare, work, counts, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        try:
            self._answers()
        except BaseException:
            self.close()
            raise

    def step(self, key: Key) -> float:
        """Run zero_grad and a step; give the seconds of the slower process."""
        return max(self._ask("step", key))

    def gradients(self, key: Key) -> Gradients:
        """Give what the last step of `key` left in all processes' layers."""
        parts = self._ask("gradients", key)
        return {
            name: torch.from_numpy(value.copy()) for part in parts for name, value in part.items()
        }

    def results(self, key: Key) -> list[Any]:
        """Run what `key` names, untimed; give what it returned in each process."""
        return self._ask("results", key)

    def _ask(self, what: str, key: Key) -> list[Any]:
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # it has ended, and may have said why
                pipe.send((what, key))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = [self._answer(rank) for rank in range(len(self._pipes))]
        faults = [f"rank {r}: {a}" for r, a in enumerate(answers) if isinstance(a, str)]
        if faults:
            raise RuntimeError("; ".join(faults))
        return answers

    def _answer(self, rank: int) -> Any:
        pipe = self._pipes[rank]
        if not pipe.poll(ANSWER_S):
            return f"no answer for {ANSWER_S:g} s"
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            return "the process has ended"

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


@dataclass(frozen=True, slots=True)
class OfProcesses:
    """One of the contestants that a peer's processes run.

    One that leaves out the bubble is given it: its time is that of M micro-batches, and counts as
    that of M + K - 1.
    """

    name: str
    num_microbatches: int
    processes: Processes
    lacks_bubble: bool = False

    def step(self) -> float:
        seconds = self.processes.step((self.name, self.num_microbatches))
        bubble = (NUM_STAGES - 1) / self.num_microbatches if self.lacks_bubble else 0.0
        return seconds * (1 + bubble)

    def gradients(self) -> Gradients:
        return self.processes.gradients((self.name, self.num_microbatches))

    def close(self) -> None:
        """The processes serve other contestants too."""


def _serve(
    place: tuple[int, int, int],
    prepare: Prepare[_Work],
    work: _Work,
    counts: tuple[int, ...],
    pipe: Connection,
) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # stdout is the table's
    rank, num_processes, port = place
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    try:
        torch.set_num_threads(1)
        parts = prepare(rank, work, counts)
        pipe.send(None)
        while True:
            what, key = pipe.recv()
            pipe.send(_ANSWERS[what](parts[key]))
    except EOFError:
        pass
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)  # leaving the group needs the other process, which may have left already


def _timed(part: Part) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    part.run_step()
    return time.perf_counter() - start_s


def _gradients(part: Part) -> dict[str, "numpy.ndarray[Any, Any]"]:
    return {name: value.numpy() for name, value in gradients_of(part.layers).items()}


_ANSWERS: dict[str, Callable[[Part], Any]] = {
    "step": _timed,
    "gradients": _gradients,
    "results": lambda part: part.run_step(),
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
