"""Run plans for real: the ranks as threads of this process, or each as a process of its own."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks.foresight.subjects import Subject
from benchmarks.throughput.processes import Key, Part, Processes
from penstock import Mesh, Pipeline, Plan, Trace, init_mesh

Peaks = dict[int, int]
"""Bytes that each stage keeps at the most."""
_STEP, _PEAKS = 0, 1


@dataclass(frozen=True, slots=True)
class Runner:
    """One plan that can be run.

    `step` runs two steps and returns the seconds of the second one, so that caches and memory are
    as in training; `peaks` returns what the stages kept in one.
    """

    step: Callable[[], float]
    peaks: Callable[[], Peaks]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with the model it is of."""

    subject: Subject
    plan: Plan

    def pipeline(self, mesh: Mesh | None = None) -> Pipeline:
        """Build model and pipeline."""
        return Pipeline(self.subject.layers(), plan=self.plan, loss=self.subject.loss, mesh=mesh)


class Runners:
    """Everything that was started for some plans, by their names; a context manager."""

    def __init__(self, plans: Mapping[str, Planned]) -> None:
        self._pipes: list[Pipeline] = []
        self._groups: list[Processes] = []
        self._found: dict[str, Runner] = {}
        between: dict[tuple[int, int], dict[str, Planned]] = defaultdict(dict)
        for name, planned in plans.items():
            if planned.plan.transport.is_between_processes:
                placement = planned.plan.placement
                between[placement.num_places, placement.num_replicas][name] = planned
            else:
                self._found[name] = self._thread_runner(planned)
        for axes, own in between.items():
            self._found |= self._process_runners(axes, own)

    def __enter__(self) -> Mapping[str, Runner]:
        return self._found

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for group in self._groups:
            group.close()

    def _thread_runner(self, planned: Planned) -> Runner:
        pipe = planned.pipeline()
        self._pipes.append(pipe)
        run_step = _stepping(pipe, planned)

        def step() -> float:
            run_step()
            start_s = time.perf_counter()
            run_step()
            return time.perf_counter() - start_s

        return Runner(step, partial(_peaks, pipe, run_step))

    def _process_runners(
        self, axes: tuple[int, int], plans: Mapping[str, Planned]
    ) -> dict[str, Runner]:
        group = Processes(_prepare, dict(plans), axes, math.prod(axes))
        self._groups.append(group)
        return {
            name: Runner(
                partial(_second, partial(group.step, (name, _STEP))),
                partial(_first, partial(group.results, (name, _PEAKS))),
            )
            for name in plans
        }


def _stepping(pipe: Pipeline, planned: Planned, mesh: Mesh | None = None) -> Callable[[], None]:
    """Return what runs a step on a replica's share of the batch."""
    inputs, targets = planned.subject.data()
    if mesh is not None:
        inputs, targets = (x.chunk(mesh.num_replicas)[mesh.replica] for x in (inputs, targets))

    def run_step() -> None:
        pipe.zero_grad()
        pipe.train_step(inputs, targets)

    return run_step


def _peaks(pipe: Pipeline, run_step: Callable[[], None]) -> Peaks:
    """Run a step that counts what the stages keep."""
    pipe.trace = Trace.MEMORY
    run_step()
    pipe.trace = Trace.OFF
    assert pipe.last_timeline is not None
    return pipe.last_timeline.peak_bytes()


def _second(step: Callable[[], float]) -> float:
    step()
    return step()


def _first(results: Callable[[], Iterable[Peaks]]) -> Peaks:
    """Return what the first process says: each knows of all stages."""
    return next(iter(results()))


def _prepare(rank: int, plans: dict[str, Planned], axes: tuple[int, ...]) -> dict[Key, Part]:
    """Make, in one of the processes, a pipeline for each plan; axes are (stages, replicas)."""
    num_stages, num_replicas = axes
    mesh = init_mesh(num_stages, num_replicas)
    found: dict[Key, Part] = {}
    for name, planned in plans.items():
        pipe = planned.pipeline(mesh)
        run_step = _stepping(pipe, planned, mesh)
        found[name, _STEP] = Part(run_step, {})
        found[name, _PEAKS] = Part(partial(_peaks, pipe, run_step), {})
    return found
