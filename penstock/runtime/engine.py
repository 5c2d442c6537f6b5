"""Run a plan on the stages of this process, one call at a time."""

import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CutError, PenstockError
from penstock.mesh import Mesh
from penstock.model.layers import Layers
from penstock.model.stage_plan import StagePlan
from penstock.planner.placement import Placement
from penstock.planner.plan import Plan
from penstock.planner.unsplit import divides_backwards
from penstock.schedules.ir import Schedule
from penstock.schedules.lower import Lowering, Mode, lower
from penstock.torch_private import uncompiled
from penstock.types import TiedGradients, Trace

from .aside import Aside
from .caller import CallerContext, fresh_casts, guarded_default_generators
from .devices import order_copies
from .drivers import AbstractDriver, Work
from .gradient_dtype import widen_gradients
from .gradient_hooks import summed_hooks
from .microbatches import Batch, Splitter
from .record import Record, gather_noted
from .replicas import Replicas
from .run import Run, Streams
from .shards.divided import Shards
from .stage.stage import Stage
from .unsplit import merged_reasons
from .workers import ThreadDriver

_Key = tuple[Mode, int, int]
"""Cache key of a lowered program: mode, micro-batches per mini-batch, mini-batches."""


class StepLock:
    """Lets one call at a time run the stages, in the process that owns their threads.

    That process is the first to run them, or the one that other processes are connected with.
    """

    def __init__(self, *, is_connected: bool = False) -> None:
        self._lock = threading.Lock()
        self._process = os.getpid() if is_connected else None
        self._in_backward = False

    def __reduce__(self) -> tuple[Any, ...]:
        return StepLock, ()  # a copied pipeline runs on its own

    @contextmanager
    def taken(self, *, backward: bool = False) -> Iterator[None]:
        """Hold the lock; with `backward`, for the backward of an earlier call.

        A PenstockError refuses a second call meanwhile, and a process forked from the owner.
        """
        # A call that waited for the lock could wait for itself: refuse at once instead.
        here = os.getpid()
        self._process = self._process or here
        if here != self._process:
            raise PenstockError(
                f"this pipeline was used in process {self._process}, and this is process {here}, "
                "forked from it: the threads that run the stages are not here, so that a step "
                "would wait for ever. Make the pipeline in this process, or start it by "
                'multiprocessing.get_context("spawn")'
            )
        if not self._lock.acquire(blocking=False):
            if self._in_backward:
                raise PenstockError(
                    "this pipeline was called while the backward of an earlier call runs. A "
                    "torch.utils.checkpoint around the pipeline does that: what a stage saved is "
                    "to be computed again, and the stages are busy. Leave it out and use "
                    "recompute=Recompute.STAGE, which saves as much; or give checkpoint "
                    "use_reentrant=True. A hook that calls the pipeline does it too: call it later"
                )
            raise PenstockError(
                "this pipeline is running already: it was called from another thread, or from "
                "inside one of its own layers, losses or hooks. Its stages do one step at a time; "
                "let the first call end, or use a second pipeline (copy.deepcopy)"
            )
        self._in_backward = backward
        try:
            yield
        finally:
            self._lock.release()


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts of an engine that a new plan keeps: placement, splitter, replicas, drivers."""

    processes: Placement
    splitter: Splitter
    replicas: Replicas | None
    driver: AbstractDriver
    in_caller: AbstractDriver
    lock: StepLock


@dataclass(kw_only=True, eq=False)
class Engine:
    """Runs one plan: drives the stages of this process.  `construction.make_engine` makes it.

    `places` are the parameters and blocks that stages were cut from.  `lowering` turns schedules
    into programs.  `aside` watches the state that stages share.
    """

    layers: Layers
    loss: Any
    plan: Plan
    mesh: Mesh
    shared: Shared
    aside: Aside
    shards: Shards
    devices: tuple[torch.device, ...]
    stage_plans: tuple[StagePlan, ...]
    stages: tuple[Stage, ...]
    lowering: Lowering
    places: list[tuple[dict[str, Any], str, Any]]
    is_current: bool = True
    _programs: dict[_Key, Schedule] = field(default_factory=dict)
    _have_run: set[_Key] = field(default_factory=set)
    _dividing: set[_Key] = field(default_factory=set)
    """Keys of the programs whose backwards have two parts."""
    _has_looked: bool = False

    def __post_init__(self) -> None:
        self.splitter, self.processes = self.shared.splitter, self.shared.processes
        self.is_asynchronous = self.plan.schedule.is_asynchronous
        self._with_streams = [s.device for s in self.stages if s.device.is_cuda]
        modules = (m for step in self.layers for m in step.module.modules())
        self._has_compiled = any(uncompiled(m) is not None for m in modules)
        self._has_device = self.mesh.own_device not in (None, torch.device("cpu"))

    def tensors(self) -> list[Tensor]:
        """List the parameters and buffers of the stages that run here."""
        owned = [stage.weights.owned for stage in self.stages]
        return list(dict.fromkeys(t for part in owned for t in (*part.parameters, *part.buffers)))

    def check_unchanged(self) -> None:
        """Raise CutError for a replaced parameter or block, ConfigError for other BatchNorms."""
        for stage in self.stages:
            stage.check_norms()
        for holder, name, held in self.places:
            if holder.get(name) is not held:
                kind = "block" if isinstance(held, nn.Module) else "parameter"
                raise CutError(
                    f"the {kind} '{name}' is another one than when the pipeline was made "
                    "(load_state_dict(assign=True), an assignment). Change values in place, or "
                    "capture the model and make the pipeline again"
                )

    def holds(self, layer: int) -> bool:
        """Tell whether layer number `layer` runs in this process."""
        return any(step.index == layer for stage in self.stages for step in stage.plan.steps)

    @property
    def loss_here(self) -> Any:
        """The loss function, if this process computes the loss; else None."""
        return next((self.loss for stage in self.stages if stage.plan.output), None)

    def _needs_hooks(self, trace: Trace) -> str:
        """Name the features of this plan that need saved_tensors_hooks."""
        uses = {
            "a recompute, to save nothing in a forward": self.lowering.recompute,
            "offload, to move what is saved": self.lowering.offload,
            f"{trace}, to count what is saved": trace is Trace.MEMORY,
        }
        return "; ".join(use for use, is_on in uses.items() if is_on)

    def program(self, mode: Mode, num_microbatches: int, num_minibatches: int = 1) -> Schedule:
        """Return the lowered and verified schedule of a call; cache it.

        A ScheduleError names a broken law; a ConfigError, a stage that it runs on another rank.
        """
        key = (mode, num_microbatches, num_minibatches)
        if key not in self._programs:
            program = lower(self.lowering, num_microbatches, mode, num_minibatches)
            self._programs[key] = program
            if divides_backwards(program):
                self._dividing.add(key)
        return self._programs[key]

    def program_of(self, run: Run, mode: Mode) -> Schedule:
        """Return the schedule that `run` runs."""
        return self.program(*self._key(run, mode))

    def _key(self, run: Run, mode: Mode) -> _Key:
        num_microbatches = run.streams.num_microbatches
        return mode, num_microbatches, len(run.batch.sizes) // num_microbatches

    def reporting(self) -> AbstractContextManager[None]:
        """Report an exception raised inside to the other processes, with the stages here."""
        if self.mesh.processes is None:
            return nullcontext()
        return self.mesh.world.reporting(self.processes.names)

    def new_run(
        self, batch: Batch, phase: str, step: int, *, with_grad: bool, num_minibatches: int = 1
    ) -> Run:
        """Return the `Run` of a call for `batch`, which may hold several mini-batches."""
        num_microbatches = len(batch.sizes) // num_minibatches
        return Run(
            batch=batch,
            streams=Streams(self.plan.seed, phase, step, num_microbatches, batch.first),
            caller=CallerContext.capture(with_grad, self.devices),
        )

    def drive(
        self, run: Run, mode: Mode, *, caller: CallerContext | None = None, in_caller: bool = False
    ) -> None:
        """Run a schedule to its end, by the driver; with `in_caller`, in the calling thread.

        `caller` replaces the context of the run, for backwards that come later.

        Raises:
            Exception: the first one that a layer or the loss raised, with a note of the place.
            RandomnessError: a layer drew random numbers outside its stream.
            ConfigError: the plan needs saved_tensors_hooks, and the caller has disabled them.
        """
        # 1. Prepare the stages, and check that nothing changed since they were made.
        self.check_unchanged()
        self._begin_stages(run)
        run.aside = self.aside.begin(run) if self.aside.has_shared else None
        stages = {stage.index: stage for stage in self.stages}
        caller = caller or run.caller
        caller.check_hooks(self._needs_hooks(run.batch.trace))
        program, enters = self.program_of(run, mode), caller.casts or run.caller.casts
        work = Work(program, stages, run, caller, casts=enters)
        run.looks = not self._has_looked and self._key(run, mode) in self._dividing

        # 2. Set earlier gradients and hooks aside: only this step's gradients are summed.
        is_backward = mode in (Mode.TRAIN, Mode.BACKWARDS)
        replicas = self.shared.replicas if is_backward else None
        if replicas is not None:
            parameters = [p for stage in self.stages for p in stage.weights.owned.parameters]
            replicas.hooks = summed_hooks(parameters, self.shards, self.layers, self.plan)
            replicas.set_aside(parameters)

        # 3. Choose the driver, once the caller's kernels are waited for.
        self._order(run, after=False)
        driver = self._choose_driver(run, mode, caller, in_caller=in_caller)

        # 4. Run; sum gradients over replicas and shards, then add the earlier ones.
        try:
            casts = fresh_casts() if work.casts else nullcontext()
            guarded = guarded_default_generators(self.devices, self._look_again)
            with self.shards.for_step(), guarded, casts:
                driver.drive(work)
                self._order(run, after=True)
                if replicas is not None and run.window is None:  # else each update waits itself
                    replicas.finish()
            if replicas is not None:
                replicas.add_earlier()
            if self._has_device:
                self.mesh.wait_for_device("for its device to have what the other processes send")
            if run.looks:
                self._tell_unsplit(run)
        except BaseException as error:  # facts learned of layers may be incomplete, or the cause
            self._look_again(error)
            raise
        finally:
            self._leave(run)

    def _choose_driver(
        self, run: Run, mode: Mode, caller: CallerContext, *, in_caller: bool
    ) -> AbstractDriver:
        """Return the driver of a run, and note in the run whether one thread runs all stages.

        A mode that no worker can enter keeps the run in this thread, and so does a first run with
        compiled layers: layers learn how they draw, and seed Python's generator, which torch puts
        back when it has compiled, in whichever thread.
        """
        key, driver = self._key(run, mode), self.shared.driver
        is_first = key not in self._have_run
        self._have_run.add(key)
        if isinstance(driver, ThreadDriver):
            in_caller |= caller.stays() or (is_first and self._has_compiled)
        driver = self.shared.in_caller if in_caller else driver
        num_ranks = len(self.program(*key).programs)
        run.is_alone = num_ranks == 1 or not isinstance(driver, ThreadDriver)
        return driver

    def _begin_stages(self, run: Run) -> None:
        """Prepare the stages for a run, and the dtype of their gradients."""
        run.sums_tied = self.plan.tied_gradients is TiedGradients.SUMMED
        run.gradient_dtype = self.plan.gradient_dtype
        for stage in self.stages:
            stage.begin(run)
            if run.gradient_dtype is not None:  # before earlier gradients are set aside
                widen_gradients(stage.weights.owned.parameters, run.gradient_dtype)

    def _look_again(self, error: BaseException) -> None:
        for stage in self.stages:
            stage.forget(error)

    def _tell_unsplit(self, run: Run) -> None:
        """Add to the plan, on all processes, the reasons why stages did not split backwards."""
        seen = [here.divided for here in run.stages.values()]
        purpose = "for what their backwards in two parts have shown"
        everyone = self.mesh.world.gather(seen, purpose)
        self.plan = replace(self.plan, unsplit=merged_reasons(chain.from_iterable(everyone)))
        self._has_looked = True

    def _leave(self, run: Run) -> None:
        if self.shared.replicas is not None:
            self.shared.replicas.give_up()
            self.shared.replicas.hooks.put_back()
        if run.aside is not None:
            run.aside.end()
        for stage in self.stages:
            stage.end(run)
        self._order(run, after=True)

    def _order(self, run: Run, *, after: bool) -> None:
        """Order the run's work on GPUs behind the caller's, or `after` the run the other way."""
        for device in self._with_streams:
            (device.make_caller_wait if after else device.wait_for_caller)()
        if torch.cuda.is_initialized():
            order_copies(run.batch.inputs[0], run.batch.targets[0], after=after)

    def record(self, run: Run, mode: Mode) -> Record | None:
        """Return the record of a traced run on all stages; None if it was not traced."""
        if run.batch.trace is Trace.OFF:
            return None
        noted = gather_noted(self.mesh, run.recorded, self.splitter.agreed_s)
        return Record(self.program_of(run, mode), noted)

    def close(self) -> None:
        """End the worker threads; the next run starts new ones."""
        self.shared.driver.close()
