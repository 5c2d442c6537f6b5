"""The stages of a pipeline in this process, their programs, and what drives them."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CutError, PenstockError, RandomnessError
from penstock.mesh import Mesh
from penstock.mesh.start import check_timeout
from penstock.model.layers import Layers
from penstock.model.stage_plan import StagePlan, Step
from penstock.model.stages import check_partition, stage_of_layers
from penstock.schedules import Family, Schedule
from penstock.schedules.lower import Lowering, Mode, lower
from penstock.torch_private import cache_weights_per_thread
from penstock.types import Recompute, TiedGradients, Trace, Transport

from .batch_norm import batch_norms, warn_of_unpooled
from .caller import CallerContext
from .crew import Alone, Crew, Together
from .default_generators import guarded_default_generators, rewound_default_generators
from .drivers import AbstractDriver, CallerDriver, ProcessDriver, Work
from .host_memory import keep_freed_memory
from .record import Record
from .run import Run
from .stage import Stage
from .workers import ThreadDriver


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How an engine runs its stages; `ranks[stage]` is who runs a stage, as the schedule says.

    With `draws`, layers without values get drawn ones; else a file has them.
    """

    schedule: Family
    ranks: tuple[int, ...]
    recompute: Recompute
    transport: Transport
    num_threads: int
    timeout_s: float
    seed: int
    draws: bool
    mesh: Mesh | None
    pools_statistics: bool
    tied_gradients: TiedGradients = TiedGradients.PER_MICROBATCH

    def __post_init__(self) -> None:
        """Refuse a deadline that no wait could have."""
        check_timeout(self.timeout_s)

    @property
    def choices(self) -> str:
        """The schedule, what is recomputed and what is summed, in words."""
        words = f"schedule={self.schedule}, recompute={self.recompute.name}"
        is_usual = self.tied_gradients is TiedGradients.PER_MICROBATCH
        return words if is_usual else f"{words}, tied_gradients={self.tied_gradients.name}"

    def make_driver(self) -> AbstractDriver:
        """Make what runs the programs."""
        if self.mesh is not None and self.mesh.is_distributed:
            return ProcessDriver(self.mesh, self.ranks, self.num_threads)
        if self.transport is Transport.LOOPBACK:
            return CallerDriver(self.num_threads)
        return ThreadDriver(self.num_threads, self.timeout_s)

    def make_crew(self) -> Crew:
        """Make what the processes agree through."""
        if self.mesh is not None and self.mesh.is_distributed:
            return Together(self.mesh, self.ranks, pools_statistics=self.pools_statistics)
        return Alone()


class Engine:
    """Cuts layers into stages on devices, and runs as a schedule says those that are run here."""

    def __init__(self, layers: Layers, loss: Any, how: Execution) -> None:
        keep_freed_memory()
        cache_weights_per_thread()
        self._layers, self._loss, self._how = layers, loss, how
        self._running = _Turn()
        warn_of_unpooled(
            _with_loss([step.module for step in layers], loss),
            over_replicas=how.pools_statistics,
        )
        self.crew = how.make_crew()
        self._driver = how.make_driver()
        self._is_threaded = isinstance(self._driver, ThreadDriver)
        self._in_caller = CallerDriver(how.num_threads)
        self._programs: dict[tuple[Mode, int], Schedule] = {}
        self._plans: tuple[StagePlan, ...] = ()
        self._lowering = Lowering(family=how.schedule, ranks=how.ranks)
        self.partition: tuple[int, ...] = ()
        self.devices: tuple[torch.device, ...] = ()
        self.stages: tuple[Stage, ...] = ()
        self._places: list[tuple[dict[str, Any], str, Any]] = []

    def cut(self, partition: tuple[int, ...], devices: Sequence[torch.device]) -> None:
        """Cut the layers anew and move them to their stages' devices; nothing of a run is alive
        now.  Layers that another process runs give back their memory.

        Raises:
            PartitionError: the partition does not fit the layers.
        """
        check_partition(partition, len(self._layers))
        self._layers.check_sharing(stage_of_layers(partition))
        plans = self._layers.plan_stages(partition)
        self._plans = tuple(plans)
        self.crew.readers = tuple(plan.index for plan in plans if plan.reads_input)
        mine = [(p, d) for p, d in zip(plans, devices, strict=True) if self.crew.runs(p.index)]
        self._layers.place(mine, self._how.seed, draws=self._how.draws)
        self.partition, self.devices = partition, tuple(devices)
        self.stages = tuple(
            Stage(plan, device, len(self._layers), self._loss_of(plan), self.crew.replicas)
            for plan, device in mine
        )
        if self.crew.replicas is not None:
            self.crew.replicas.start_equal(
                [t for s in self.stages for t in (*s.parameters, *s.buffers)]
            )
        recomputes = self._how.recompute is Recompute.STAGE
        self._lowering = Lowering(
            family=self._how.schedule,
            ranks=self._how.ranks,
            transfers=[transfer for plan in plans for transfer in plan.transfers],
            recompute=range(len(plans)) if recomputes else (),
            commits=[plan.index for plan in plans if batch_norms(self._modules_of(plan))],
            posts=len(mine) < len(plans),
            reduces=self.crew.replicas is not None,
        )
        self._programs.clear()
        self._places = self._layers.places()

    def _check_places(self) -> None:
        """See that what the stages were cut from is still there.

        Raises:
            CutError: a parameter or a block is another one.
        """
        for holder, name, held in self._places:
            if holder.get(name) is not held:
                kind = "block" if isinstance(held, nn.Module) else "parameter"
                raise CutError(
                    f"the {kind} '{name}' is another one than when the pipeline was made "
                    "(load_state_dict(assign=True), an assignment). Change values in place, or "
                    "capture the model and make the pipeline again"
                )

    def devices_after(self, move: Callable[[Tensor], Tensor]) -> list[torch.device]:
        """Say where each stage is once its layers' tensors were moved; without any, where `move`
        puts one.
        """
        devices = list(self.devices)
        for stage in self.stages:
            tensors = (t for step in stage.plan.steps for t in _tensors(step.module))
            nowhere = torch.empty(0, device=stage.device.device)
            devices[stage.index] = next((t.device for t in tensors), move(nowhere).device)
        return devices

    def holds(self, layer: int) -> bool:
        """Tell whether layer number `layer` runs in this process."""
        return any(step.index == layer for stage in self.stages for step in stage.plan.steps)

    def _loss_of(self, plan: StagePlan) -> Any:
        return self._loss if plan.output else None

    def _modules_of(self, plan: StagePlan) -> list[nn.Module]:
        return _with_loss([step.module for step in plan.steps], self._loss_of(plan))

    def program(self, mode: Mode, num_microbatches: int) -> Schedule:
        """Give the lowered and verified schedule of a call; kept for the next one like it.

        Raises:
            ScheduleError: the schedule is wrong.
            ConfigError: for this number of micro-batches it runs a stage on another rank.
        """
        key = (mode, num_microbatches)
        if key not in self._programs:
            self._programs[key] = lower(self._lowering, num_microbatches, mode)
        return self._programs[key]

    def one_at_a_time(self) -> AbstractContextManager[None]:
        """Let one call at a time use the stages.

        Raises:
            PenstockError: another call is under way, in another thread or around this one.
        """
        return self._running.taken()

    def drive(self, run: Run, mode: Mode, *, in_caller: bool = False) -> None:
        """Run a schedule to its end, by the driver; with `in_caller`, in the calling thread.

        Raises:
            Exception: whatever a layer or the loss raised first, with the place noted.
            RandomnessError: a layer drew random numbers outside its stream.
            ConfigError: it needs saved_tensors_hooks, and the caller has disabled them.
        """
        self._check_places()
        run.sums_tied = self._how.tied_gradients is TiedGradients.SUMMED
        for stage in self.stages:
            stage.check_norms()
        stages = {stage.index: stage for stage in self.stages}
        caller = CallerContext.capture(run.with_grad, self.devices) if run.resumed else run.caller
        caller.check_hooks(self._how.recompute, run.trace)
        work = Work(self.program(mode, len(run.inputs)), stages, run, caller)
        replicas = self.crew.replicas if mode is Mode.TRAIN else None
        if replicas is not None:
            replicas.set_aside([p for stage in self.stages for p in stage.parameters])
        for stage in self.stages:
            stage.device.wait_for_caller()
        try:
            with guarded_default_generators(self.devices):
                stays = in_caller or (self._is_threaded and caller.stays())
                (self._in_caller if stays else self._driver).drive(work)
            if replicas is not None:
                replicas.finish()
        except BaseException as error:  # what was seen of the layers may be half, or the cause
            for stage in self.stages:
                stage.forget(error)
            raise
        finally:
            for stage in self.stages:
                stage.device.make_caller_wait()

    def evaluate(self, new_run: Callable[[], Run]) -> Run:
        """Run an evaluation; where a layer draws in it, once more, with a look at each layer.

        Raises:
            RandomnessError: a layer drew random numbers outside its stream.
        """
        is_several = self.crew.is_several
        try:
            with rewound_default_generators(self.devices):
                return self._evaluated(new_run(), trusting=not is_several)
        except RandomnessError:
            if is_several:
                raise
            return self._evaluated(new_run(), trusting=False)

    def _evaluated(self, run: Run, *, trusting: bool) -> Run:
        run.trusts_evaluation = trusting
        self.drive(run, Mode.EVAL)
        return run

    def record(self, run: Run, mode: Mode) -> Record | None:
        """Give what a traced run noted on all stages; None if it was not traced."""
        if run.trace is Trace.OFF:
            return None
        noted = self.crew.noted(run)
        program = self.program(mode, len(run.inputs))
        return Record(program, noted.times_s, noted.sent_bytes, noted.memory)

    def describe(self) -> Iterator[str]:
        """Give one line a stage: where it runs, layers, parameters."""
        here = {stage.index: str(stage.device.device) for stage in self.stages}
        for plan in self._plans:
            steps = plan.steps
            where = here.get(plan.index, f"rank {self.crew.rank_of(plan.index)}")
            kinds = [f"{kind} x{count}" if count > 1 else kind for kind, count in _kinds(steps)]
            span = steps[0].name if len(steps) == 1 else f"{steps[0].name} to {steps[-1].name}"
            yield (
                f"  stage {plan.index} on {where}: layers {span} "
                f"({', '.join(kinds)}), {plan.num_parameters:,} parameters"
            )

    def close(self) -> None:
        """End the worker threads; the next run starts new ones."""
        self._driver.close()


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


def _with_loss(modules: list[nn.Module], loss: Any) -> list[nn.Module]:
    return [*modules, loss] if isinstance(loss, nn.Module) else modules


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _kinds(steps: Sequence[Step]) -> Iterator[tuple[str, int]]:
    for kind, group in groupby(type(step.module).__name__ for step in steps):
        yield kind, len(list(group))
