"""Run plans for real, one at a time and each in processes of its own, as a training is run.

    round 1     A: start, steps, end    B: start, steps, end    ...
    round 2     A: start, steps, end    ...

Never are two alive: forty pipelines in one process slow each other's Python and caches by a
quarter, and a training has one.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from torch import distributed as dist

from benchmarks.foresight.subjects import Subject
from benchmarks.report import progress
from benchmarks.throughput.processes import Key, Part, Processes
from penstock import Mesh, Pipeline, Plan, Trace, init_mesh

Peaks = dict[int, int]
"""Bytes that each stage keeps at the most."""
NUM_WARM_UPS, NUM_STEPS = 2, 5
STEPS: Key = ("steps", 0)
PEAKS: Key = ("peaks", 0)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the model it is of."""

    subject: Subject
    plan: Plan

    @property
    def between(self) -> bool:
        """Whether each rank is a process."""
        return self.plan.transport.is_between_processes

    @property
    def num_processes(self) -> int:
        """How many processes run it."""
        return self.plan.placement.num_ranks if self.between else 1

    def mesh(self) -> Mesh | None:
        """Join the other processes, if there are any."""
        return init_mesh(placement=self.plan.placement, device="cpu") if self.between else None

    def pipeline(self, mesh: Mesh | None = None, inputs: Any = None) -> Pipeline:
        """Build model and pipeline; `inputs` are those of its replica."""
        given: dict[str, Any] = {"loss": self.subject.loss, "mesh": mesh, "example_inputs": inputs}
        return Pipeline(self.subject.layers(), plan=self.plan, **given)


@contextmanager
def started(planned: Planned) -> Iterator[Processes]:
    """Let processes run a plan meanwhile."""
    processes = Processes(prepare, planned, (), planned.num_processes)
    try:
        yield processes
    finally:
        processes.close()


def step_seconds(planned: Mapping[str, Planned], rounds: int) -> list[tuple[float, ...]]:
    """Run all plans in turn, round after round.

    Returns:
        For each plan the seconds of a step in each round: the median over `NUM_STEPS` of what
        the slowest process took, after `NUM_WARM_UPS`.
    """
    found: dict[str, list[float]] = {name: [] for name in planned}
    for _ in range(rounds):
        for name, each in planned.items():
            with started(each) as processes:
                taken = processes.results(STEPS)
            found[name].append(median(map(max, zip(*taken, strict=True))))
            progress(f"{name}: {found[name][-1] * 1e3:.1f} ms")
    return list(map(tuple, found.values()))


def peaks(planned: Planned) -> Peaks:
    """Run a step that counts what the stages keep."""
    with started(planned) as processes:
        found: Sequence[Peaks] = processes.results(PEAKS)
    return found[0]  # each process knows of all stages


def prepare(rank: int, planned: Planned, _: tuple[int, ...]) -> dict[Key, Part]:
    """Make, in one of the processes, its part of a pipeline."""
    mesh = planned.mesh()
    inputs, targets = planned.subject.data()
    if mesh is not None:
        inputs, targets = (x.chunk(mesh.num_replicas)[mesh.replica] for x in (inputs, targets))
    pipe = planned.pipeline(mesh, inputs)

    def run_step() -> float:
        if mesh is not None:
            dist.barrier()
        start_s = time.perf_counter()
        pipe.zero_grad()
        pipe.train_step(inputs, targets)
        return time.perf_counter() - start_s

    return {
        STEPS: Part(partial(_steps, run_step), {}),
        PEAKS: Part(partial(_peaks, pipe, run_step), {}),
    }


def _steps(run_step: Callable[[], float]) -> list[float]:
    return [run_step() for _ in range(NUM_WARM_UPS + NUM_STEPS)][NUM_WARM_UPS:]


def _peaks(pipe: Pipeline, run_step: Callable[[], float]) -> Peaks:
    run_step()  # the first one looks at the layers, and so holds a value longer
    pipe.trace = Trace.MEMORY
    run_step()
    assert pipe.last_timeline is not None
    return pipe.last_timeline.peak_bytes()
