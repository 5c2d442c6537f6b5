"""The stages of a pipeline in this process, their programs, and what drives them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import groupby
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.model.layers import Layers, Step, check_sharing
from penstock.model.stages import check_partition, plan_stages, stage_of_layers
from penstock.schedules.ir import Schedule
from penstock.schedules.lower import Mode, ScheduleFunction, lower
from penstock.types import Recompute, Trace, Transport

from .caller import CallerContext
from .host_memory import keep_freed_memory
from .random_streams import guarded_default_generators
from .record import Record
from .run import Run
from .stage import Stage
from .transport import Work, make_transport


class Engine:
    """Cuts layers into stages on devices, and runs them as a schedule says."""

    def __init__(  # noqa: PLR0913 - made in one place, the front door
        self,
        layers: Layers,
        schedule: ScheduleFunction,
        recompute: Recompute,
        transport: Transport,
        num_threads: int,
        timeout_s: float,
        loss: Any,
    ) -> None:
        keep_freed_memory()
        self._layers = layers
        self._loss = loss
        self._running = _Turn()
        self._schedule = schedule
        self._recompute = recompute
        self._transport = make_transport(transport, num_threads, timeout_s)
        self._in_caller = make_transport(Transport.LOOPBACK, num_threads, timeout_s)
        self._programs: dict[tuple[Mode, int], Schedule] = {}
        self.partition: tuple[int, ...] = ()
        self.stages: tuple[Stage, ...] = ()

    def cut(self, partition: tuple[int, ...], devices: Sequence[torch.device]) -> None:
        """Cut the layers anew and move them to their stages' devices; nothing of a run is alive
        now.

        Raises:
            PartitionError: the partition does not fit the layers.
        """
        check_partition(partition, len(self._layers))
        check_sharing(self._layers, stage_of_layers(partition))
        plans = plan_stages(self._layers, partition)
        for plan, device in zip(plans, devices, strict=True):
            for step in plan.steps:
                step.module.to(device)
        self.partition = partition
        self.stages = tuple(
            Stage(plan, device, len(self._layers), self._loss if plan.output else None)
            for plan, device in zip(plans, devices, strict=True)
        )
        self._programs.clear()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each stage."""
        return tuple(stage.device.device for stage in self.stages)

    def program(self, mode: Mode, num_microbatches: int) -> Schedule:
        """Give the lowered and verified schedule of a call; kept for the next one like it.

        Raises:
            ScheduleError: the schedule is wrong.
        """
        key = (mode, num_microbatches)
        if key not in self._programs:
            self._programs[key] = lower(
                self._schedule,
                len(self.stages),
                num_microbatches,
                edges=frozenset((s.index, peer) for s in self.stages for peer in s.plan.exports),
                recompute=self._recompute is Recompute.STAGE,
                committing=[stage.index for stage in self.stages if stage.batch_norms],
                mode=mode,
            )
        return self._programs[key]

    def one_at_a_time(self) -> AbstractContextManager[None]:
        """Let one call at a time use the stages.

        Raises:
            PenstockError: another call is under way, in another thread or around this one.
        """
        return self._running.taken()

    def drive(self, run: Run, mode: Mode, *, in_caller: bool = False) -> None:
        """Run a schedule to its end, by the transport; with `in_caller`, in the calling thread.

        Raises:
            Exception: whatever a layer or the loss raised first, with the place noted.
            RandomnessError: a layer drew random numbers outside its stream.
        """
        stages = {stage.index: stage for stage in self.stages}
        caller = CallerContext.capture(run.with_grad, self.devices) if run.resumed else run.caller
        work = Work(self.program(mode, len(run.inputs)), stages, run, caller)
        for stage in self.stages:
            stage.device.wait_for_caller()
        try:
            with guarded_default_generators(self.devices):
                (self._in_caller if in_caller else self._transport).drive(work)
        except BaseException:  # what was seen of the layers may be half of it, or the cause
            for stage in self.stages:
                stage.forget()
            raise
        finally:
            for stage in self.stages:
                stage.device.make_caller_wait()

    def record(self, run: Run, mode: Mode) -> Record | None:
        """Give what a traced run noted; None if it was not traced."""
        if run.trace is Trace.OFF:
            return None
        return Record(self.program(mode, len(run.inputs)), run.times_s, run.memory)

    def describe(self) -> Iterator[str]:
        """Give one line a stage: device, layers, parameters."""
        for stage in self.stages:
            steps = stage.plan.steps
            parameters = {id(p): p.numel() for step in steps for p in step.module.parameters()}
            kinds = [f"{kind} x{count}" if count > 1 else kind for kind, count in _kinds(steps)]
            span = steps[0].name if len(steps) == 1 else f"{steps[0].name} to {steps[-1].name}"
            yield (
                f"  stage {stage.index} on {stage.device.device}: layers {span} "
                f"({', '.join(kinds)}), {sum(parameters.values()):,} parameters"
            )

    def close(self) -> None:
        """End the worker threads; the next run starts new ones."""
        self._transport.close()


class _Turn:
    """Whose turn it is to use the stages: one call's, or nobody's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Turn, ()  # a copied pipeline runs on its own

    @contextmanager
    def taken(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise PenstockError(
                "this pipeline is running already: it was called from another thread, or from "
                "inside one of its own layers, losses or hooks. Its stages do one step at a time; "
                "let the first call end, or use a second pipeline (copy.deepcopy)"
            )
        try:
            yield
        finally:
            self._lock.release()


def _kinds(steps: Sequence[Step]) -> Iterator[tuple[str, int]]:
    for kind, group in groupby(type(step.module).__name__ for step in steps):
        yield kind, len(list(group))
