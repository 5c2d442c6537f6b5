"""torch.distributed.pipelining as a contestant: one gloo process a stage, alive the whole run."""

import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.nn.functional import mse_loss

from benchmarks.throughput.contestants import NUM_STAGES, Work

SCHEDULES = ("ScheduleGPipe", "Schedule1F1B")


class TorchPeer:
    """The processes; a step of any schedule is one message to each and one answer from each.

    Between steps they wait for a message and use no core.
    """

    def __init__(self, work: Work, all_num_microbatches: tuple[int, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._processes, self._pipes = [], []
        for rank in range(NUM_STAGES):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, store, work, all_num_microbatches, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self._ask(None)

    def _ask(self, order: tuple[str, int] | None) -> list[float]:
        for pipe in self._pipes:
            pipe.send(order)
        answers = [pipe.recv() for pipe in self._pipes]  # EOFError: a process ended early
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        return answers

    def step(self, schedule: str, num_microbatches: int) -> float:
        """Run zero_grad and a step; give the seconds of the slower process."""
        return max(self._ask((schedule, num_microbatches)))

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _serve(rank: int, store: str, work: Work, counts: tuple[int, ...], pipe: Connection) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_STAGES
        )
        steps = _Steps(rank, work, counts)
        pipe.recv()
        pipe.send(0.0)
        while True:
            pipe.send(steps.run(*pipe.recv()))
    except EOFError:
        pass
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    os._exit(0)  # leaving the group needs the other process, which may have left already


class _Steps:
    """One stage and, for every number of micro-batches, its schedules."""

    def __init__(self, rank: int, work: Work, counts: tuple[int, ...]) -> None:
        self._module = _part(work, rank)
        self._inputs, self._targets = work.data()
        self._rank = rank
        self._schedules = {
            (name, count): self._schedule(name, count) for name in SCHEDULES for count in counts
        }

    def _schedule(self, name: str, num_microbatches: int) -> Any:
        from torch.distributed import pipelining

        stage = pipelining.PipelineStage(self._module, self._rank, NUM_STAGES, torch.device("cpu"))
        return getattr(pipelining, name)(stage, num_microbatches, loss_fn=mse_loss)

    def run(self, name: str, num_microbatches: int) -> float:
        """Run zero_grad and a step; both processes start together."""
        schedule = self._schedules[name, num_microbatches]
        is_first = self._rank == 0
        dist.barrier()
        start_s = time.perf_counter()
        self._module.zero_grad()
        if is_first:
            schedule.step(self._inputs, return_outputs=False)
        else:
            schedule.step(target=self._targets, losses=[], return_outputs=False)
        return time.perf_counter() - start_s


def _part(work: Work, rank: int) -> torch.nn.Sequential:
    layers = list(work.model())
    start = sum(work.per_stage[:rank])
    return torch.nn.Sequential(*layers[start : start + work.per_stage[rank]])
