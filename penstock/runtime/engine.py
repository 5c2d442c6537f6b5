"""The stages of a pipeline in this process, their programs, and what drives them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, CutError, shown
from penstock.mesh import Mesh
from penstock.model.layers import Layers
from penstock.model.owned import modules_of_loss
from penstock.model.reach import parties_of
from penstock.model.stage_plan import StagePlan, stage_of_layers
from penstock.planner.placement import Placement
from penstock.planner.plan import Plan
from penstock.planner.unsplit import divides_backwards
from penstock.schedules.ir import Schedule
from penstock.schedules.lower import Lowering, Mode, lower
from penstock.sharding.plan import Sharding
from penstock.torch_private import cache_weights_per_thread
from penstock.types import TiedGradients, Trace, Transport

from .aside import Aside
from .batch_norm import batch_norms, warn_of_unpooled
from .caller import CallerContext, fresh_casts
from .drivers import AbstractDriver, CallerDriver, ProcessDriver, Work
from .gradient_hooks import summed_hooks
from .memory.stores import store_on
from .microbatches import Batch, Splitter
from .planning import stage_devices
from .random.generators import guarded_default_generators
from .record import Record, gather_noted
from .replicas import Replicas, refuse_sparse
from .run import Run, Streams
from .shards.divided import Shards
from .stage.stage import Keeping, Stage
from .turn import Turn
from .unsplit import together
from .workers import ThreadDriver

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

_Key = tuple[Mode, int, int]
"""What a program is of: the mode, the micro-batches of a mini-batch, the mini-batches."""

_LARGEST_BLOCK_BYTES = (32 << 20) - (64 << 10)
"""Just below 32 MiB, glibc's DEFAULT_MMAP_THRESHOLD_MAX; blocks above teach it nothing."""


@cache
def keep_freed_memory() -> None:
    """Keep freed memory in the process: a step frees and takes the same megabytes again and again.

    glibc gives free memory at the end of a heap back once it exceeds twice the largest block that
    was ever mapped on its own and freed; the next micro-batch pays with page faults, 5 % of a step
    of small blocks (benchmarks/throughput).  Mapping and freeing one large block, whose pages are
    never touched, raises that bound to 64 MiB.  Other allocators are not impressed.
    """
    torch.empty(_LARGEST_BLOCK_BYTES, dtype=torch.uint8)


class Engine:
    """Runs a plan: cuts layers into stages on devices, and drives those that run here.

    An engine keeps its plan.  With `before`, it takes over from an engine of another plan for the
    same layers, nothing of which is running now: its processes, its threads and its turn.

    Making one moves the layers to their stages' devices; layers that another process runs give
    back their memory.  With `draws`, layers without values get drawn ones; else a file has them.

    Raises:
        PartitionError: layers on different stages share what only one stage can have.
    """

    _lasting: "_Lasting"

    def __init__(  # noqa: PLR0913 - what a pipeline is made of
        self,
        layers: Layers,
        loss: Any,
        plan: Plan,
        mesh: Mesh,
        *,
        draws: bool = True,
        before: "Engine | None" = None,
        sharding: Sharding | None = None,
    ) -> None:
        stage_of = stage_of_layers(plan.partition)
        layers.check_sharing(stage_of)
        parties = before._aside.parties if before else parties_of(layers, loss)
        self._aside: Aside = Aside(parties, stage_of, across=mesh.stages.size > 1)
        self._layers, self.loss, self.plan, self.mesh = layers, loss, plan, mesh
        lasting = _Lasting.of(layers, loss, plan, mesh) if before is None else before._lasting
        self._lasting = lasting
        self.splitter, self.processes = lasting.splitter, lasting.processes
        replicas = lasting.replicas
        self.stage_plans = plans = tuple(layers.plan_stages(plan.partition))
        self.splitter.readers = tuple(p.index for p in plans if p.reads_input)
        self.devices = stage_devices(plan, mesh)
        here = self.processes.stages_of(mesh.rank)
        mine = [(p, self.devices[p.index]) for p in plans if p.index in here]
        self.shards: Shards = Shards(sharding, mesh) if before is None else before.shards
        cuts = sharding is not None and before is None
        layers.place(mine, plan.seed, draws=draws, placed=self.shards.place if cuts else None)
        divided = self.shards.calls
        self.stages = tuple(
            Stage(p, device, len(layers), self._loss_of(p), replicas, self._keeping_of(p), divided)
            for p, device in mine
        )
        if replicas is not None:
            replicas.partial = self.shards.partial
            refuse_sparse(chain.from_iterable(p.steps for p, _ in mine), self.shards)
            replicas.start_equal(self.tensors(), self.shards.cut)
        self._with_streams = [s.device for s in self.stages if s.device.is_cuda]
        self._places = layers.places()
        self._programs: dict[_Key, Schedule] = {}
        self._dividing: set[_Key] = set()  # those with backwards in two parts
        self._lowering = self._how_to_lower()
        self._has_looked = False
        self.is_asynchronous = plan.schedule.is_asynchronous
        self.is_current = True
        if before is not None:
            before.is_current = False

    def tensors(self) -> list[Tensor]:
        """List the parameters and buffers of the stages that run here."""
        owned = [stage.weights.owned for stage in self.stages]
        return list(dict.fromkeys(t for own in owned for t in (*own.parameters, *own.buffers)))

    def described(self) -> Iterator[str]:
        """Say in one line a stage where it runs, its layers and parameters."""
        here = {stage.index: str(stage.device.device) for stage in self.stages}
        for plan in self.stage_plans:
            index, steps = plan.index, plan.steps
            where = here.get(index, f"rank {self.processes.rank_of(index, self.mesh.replica)}")
            names = groupby(type(step.module).__name__ for step in steps)
            counts = ((name, len(list(group))) for name, group in names)
            kinds = [f"{name} x{count}" if count > 1 else name for name, count in counts]
            span = steps[0].name if len(steps) == 1 else f"{steps[0].name} to {steps[-1].name}"
            yield (
                f"  stage {index} on {where}: layers {span} ({', '.join(kinds)}), "
                f"{plan.num_parameters:,} parameters"
            )

    def check_unchanged(self) -> None:
        """See that what the stages were cut from is still there, and nothing else.

        Raises:
            CutError: a parameter or a block is another one.
            ConfigError: there are other BatchNorm layers.
        """
        for stage in self.stages:
            stage.check_norms()
        for holder, name, held in self._places:
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
        """The loss, where this process computes it."""
        return next((self.loss for stage in self.stages if stage.plan.output), None)

    def _loss_of(self, plan: StagePlan) -> Any:
        return self.loss if plan.output else None

    def _keeping_of(self, stage: StagePlan) -> Keeping:
        plan, index = self.plan, stage.index
        offloads = index in plan.offloading
        store = store_on(self.devices[index], plan.offload_folder) if offloads else None
        return Keeping(store, plan.dropped_layers(index))

    def _needs_hooks(self, trace: Trace) -> str:
        """Say what of this plan needs saved_tensors_hooks."""
        found = []
        if self._lowering.recompute:
            found.append("a recompute, to save nothing in a forward")
        if self._lowering.offload:
            found.append("offload, to move what is saved")
        if trace is Trace.MEMORY:
            found.append(f"{trace}, to count what is saved")
        return "; ".join(found)

    def program(self, mode: Mode, num_microbatches: int, num_minibatches: int = 1) -> Schedule:
        """Return the lowered and verified schedule of a call; kept for the next one like it.

        Raises:
            ScheduleError: the schedule is wrong.
            ConfigError: for this number of micro-batches it runs a stage on another rank.
        """
        key = (mode, num_microbatches, num_minibatches)
        if key not in self._programs:
            program = lower(self._lowering, num_microbatches, mode, num_minibatches)
            self._programs[key] = program
            if divides_backwards(program):
                self._dividing.add(key)
        return self._programs[key]

    def program_of(self, run: Run, mode: Mode) -> Schedule:
        """Return the schedule that `run` runs."""
        return self.program(*self._key(run, mode))

    def _key(self, run: Run, mode: Mode) -> _Key:
        every = run.streams.num_microbatches
        return mode, every, run.num_microbatches // every

    def _how_to_lower(self) -> Lowering:
        plans = self.stage_plans
        modules = {
            p.index: [*(step.module for step in p.steps), *modules_of_loss(self._loss_of(p))]
            for p in plans
        }
        return Lowering(
            family=self.plan.schedule,
            ranks=self.plan.placement.places,
            transfers=tuple(transfer for p in plans for transfer in p.transfers),
            recompute=self.plan.recomputing,
            offload=self.plan.offloading,
            commits=tuple(stage for stage, its in modules.items() if batch_norms(its)),
            posts=len(self.stages) < len(plans),
            reduces=self._lasting.replicas is not None and not self.plan.schedule.is_asynchronous,
        )

    def reporting(self) -> AbstractContextManager[None]:
        """Tell the other processes of whatever is raised inside, and what runs where."""
        return self.mesh.world.reporting(self._lasting.names)

    def one_at_a_time(self, *, backward: bool = False) -> AbstractContextManager[None]:
        """Let one call at a time use the stages; `backward`: that of an earlier call.

        Raises:
            PenstockError: another call is under way, in another thread or around this one; or this
                process was forked from the one whose threads run the stages.
        """
        return self._lasting.turn.taken(backward=backward)

    def new_run(
        self, batch: Batch, phase: str, step: int, *, with_grad: bool, num_minibatches: int = 1
    ) -> Run:
        """Return what a call for `batch` reads and writes, which may be several mini-batches."""
        every = len(batch.sizes) // num_minibatches
        return Run(
            batch=batch,
            streams=Streams(self.plan.seed, phase, step, every, batch.first),
            caller=CallerContext.capture(with_grad, self.devices),
        )

    def drive(self, run: Run, mode: Mode, *, in_caller: bool = False) -> None:
        """Run a schedule to its end, by the driver; with `in_caller`, in the calling thread.

        Raises:
            Exception: whatever a layer or the loss raised first, with the place noted.
            RandomnessError: a layer drew random numbers outside its stream.
            ConfigError: it needs saved_tensors_hooks, and the caller has disabled them.
        """
        self.check_unchanged()
        run.sums_tied = self.plan.tied_gradients is TiedGradients.SUMMED
        for stage in self.stages:
            stage.begin(run)
        run.aside = self._aside.begin(run) if self._aside.has_shared else None
        stages = {stage.index: stage for stage in self.stages}
        caller = CallerContext.capture(run.with_grad, self.devices) if run.resumed else run.caller
        caller.check_hooks(self._needs_hooks(run.batch.trace))
        program, enters = self.program_of(run, mode), caller.casts or run.caller.casts
        work = Work(program, stages, run, caller, casts=enters)
        run.looks = not self._has_looked and self._key(run, mode) in self._dividing
        replicas = self._lasting.replicas if mode is Mode.TRAIN else None
        if replicas is not None:
            parameters = [p for stage in self.stages for p in stage.weights.owned.parameters]
            replicas.hooks = summed_hooks(parameters, self.shards, self._layers, self.plan)
            replicas.set_aside(parameters)
        for device in self._with_streams:
            device.wait_for_caller()
        try:
            casts = fresh_casts() if work.casts else nullcontext()
            guarded = guarded_default_generators(self.devices, self._look_again)
            with self.shards.for_step(), guarded, casts:
                self._lasting.driver_for(caller, in_caller=in_caller).drive(work)
                if replicas is not None and run.window is None:  # else each update has finished
                    replicas.finish()
            if replicas is not None:
                replicas.add_earlier()
            if run.looks:
                self._tell_unsplit(run)
        except BaseException as error:  # what was seen of the layers may be half, or the cause
            self._look_again(error)
            raise
        finally:
            self._leave(run)

    def _look_again(self, error: BaseException) -> None:
        for stage in self.stages:
            stage.forget(error)

    def _tell_unsplit(self, run: Run) -> None:
        """Put into the plan, the same in all processes, what the stages' backwards have shown."""
        seen = [here.divided for here in run.stages.values()]
        what = "for what their backwards in two parts have shown"
        everyone = self.mesh.world.gather(seen, what)
        self.plan = replace(self.plan, unsplit=together(chain.from_iterable(everyone)))
        self._has_looked = True

    def _leave(self, run: Run) -> None:
        if self._lasting.replicas is not None:
            self._lasting.replicas.hooks.put_back()
        if run.aside is not None:
            run.aside.end()
        for stage in self.stages:
            stage.end(run)
        for device in self._with_streams:
            device.make_caller_wait()

    def record(self, run: Run, mode: Mode) -> Record | None:
        """Return what a traced run noted on all stages; None if it was not traced."""
        if run.batch.trace is Trace.OFF:
            return None
        noted = gather_noted(self.mesh, run.recorded, self.splitter.agreed_s)
        return Record(self.program_of(run, mode), noted)

    def close(self) -> None:
        """End the worker threads; the next run starts new ones."""
        self._lasting.driver.close()


@dataclass(frozen=True, slots=True)
class _Lasting:
    """What outlives a plan: the processes of the stages, what runs programs, and whose turn."""

    processes: Placement
    names: list[str]
    splitter: Splitter
    replicas: Replicas | None
    driver: AbstractDriver
    in_caller: AbstractDriver
    turn: Turn

    @classmethod
    def of(cls, layers: Layers, loss: Any, plan: Plan, mesh: Mesh) -> "_Lasting":
        keep_freed_memory()
        cache_weights_per_thread()
        pools = plan.batch_norm_over_replicas
        every = [*(step.module for step in layers), *modules_of_loss(loss)]
        warn_of_unpooled(every, over_replicas=pools)
        processes = mesh.processes_of(plan.placement)
        in_caller = CallerDriver(plan.threads_per_stage)
        sums = any(len(rows) * len(rows[0]) > 1 for rows in mesh.placement.meshes)
        replicas = Replicas(mesh.replicas.tensors, pools_statistics=pools) if sums else None
        driver: AbstractDriver = in_caller
        if plan.transport.is_between_processes:
            driver = ProcessDriver(mesh, plan)
        elif plan.transport is not Transport.LOOPBACK:
            driver = ThreadDriver(plan.threads_per_stage, plan.timeout_s)
        splitter, is_connected = Splitter(mesh, processes), plan.transport.is_between_processes
        turn = Turn(is_connected=is_connected)
        return cls(processes, processes.names, splitter, replicas, driver, in_caller, turn)

    def driver_for(self, caller: CallerContext, *, in_caller: bool) -> AbstractDriver:
        """Return what runs the programs: the calling thread if it must, or workers cannot."""
        stays = in_caller or (isinstance(self.driver, ThreadDriver) and caller.stays())
        return self.in_caller if stays else self.driver


def is_pipeline(module: object) -> "TypeGuard[Pipeline]":
    """Tell whether something is a `penstock.Pipeline`, whose class stands above: it has a plan."""
    return isinstance(getattr(module, "plan", None), Plan)


def check_pipeline(pipe: object) -> None:
    """Refuse what is no pipeline.

    Raises:
        ConfigError: it is none.
    """
    if not is_pipeline(pipe):
        raise ConfigError(f"pipe={shown(pipe)}; give the pipeline, a penstock.Pipeline")
