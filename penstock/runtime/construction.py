"""Make an engine: cut layers into stages, place them on devices, choose a driver."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain, groupby
from typing import Any

import torch

from penstock.mesh import Mesh
from penstock.model.layers import Layers
from penstock.model.owned import modules_of_loss
from penstock.model.reach import parties_of
from penstock.model.stage_plan import StagePlan, stage_of_layers
from penstock.planner.plan import Plan
from penstock.schedules.lower import Lowering
from penstock.sharding.plan import Sharding
from penstock.torch_private import cache_weights_per_thread
from penstock.types import Transport

from .aside import Aside
from .batch_norm import batch_norms, warn_of_unpooled
from .drivers import AbstractDriver, CallerDriver, ProcessDriver
from .engine import Engine, Shared, StepLock
from .graph_driver import GraphDriver, check_can_capture
from .memory.stores import store_on
from .microbatch_warnings import warn_of_scale_history
from .microbatches import Splitter
from .planning import stage_devices
from .replicas import Replicas, refuse_sparse
from .shards.divided import NO_LAYER, Shards
from .shards.loss import DividedCode
from .stage.stage import Stage
from .workers import ThreadDriver

_LARGEST_BLOCK_BYTES = (32 << 20) - (64 << 10)
"""Bytes of the block: just below 32 MiB, glibc's DEFAULT_MMAP_THRESHOLD_MAX."""


@cache
def keep_freed_memory() -> None:
    """Keep freed memory in the process: each step frees and takes the same megabytes.

    glibc returns the free end of a heap to the system above a bound: twice the largest block that
    was mapped alone and freed.  The next micro-batch then pays with page faults, 5 % of a step of
    small blocks (benchmarks/throughput).  One large block, mapped, never touched and freed, raises
    the bound to 64 MiB.  Other allocators ignore this.
    """
    torch.empty(_LARGEST_BLOCK_BYTES, dtype=torch.uint8)


def make_engine(  # noqa: PLR0913 - what a pipeline is made of
    layers: Layers,
    loss: Any,
    plan: Plan,
    mesh: Mesh,
    *,
    draws: bool = True,
    sharding: Sharding | None = None,
    before: Engine | None = None,
    cuda_graphs: bool = False,
) -> Engine:
    """Cut layers into stages, and move the stages of this process to their devices.

    Layers of other processes free their memory.  With `draws`, layers without values get random
    ones; else a file has them.  The engine takes over the processes, threads and lock of `before`,
    an idle engine of another plan for the same layers.  A PartitionError refuses stages that share
    state that only one can have.
    """
    # 1. Find the state that stages share; take over what outlives a plan.
    stage_of = stage_of_layers(plan.partition)
    layers.check_sharing(stage_of)
    parties = before.aside.parties if before else parties_of(layers, loss)
    aside = Aside(parties, stage_of, across=mesh.stages.size > 1)
    shared = before.shared if before else _shared_parts(layers, loss, plan, mesh, cuda_graphs)
    replicas, plans = shared.replicas, tuple(layers.plan_stages(plan.partition))
    shared.splitter.readers = tuple(p.index for p in plans if p.reads_input)

    # 2. Put the layers of this process's stages on their devices, whole or in shards.
    devices = stage_devices(plan, mesh)
    if isinstance(shared.driver, GraphDriver):
        check_can_capture(plan, devices, mesh)
    here = shared.processes.stages_of(mesh.rank)
    mine = [(p, devices[p.index]) for p in plans if p.index in here]
    shards = Shards(sharding, mesh) if before is None else before.shards
    cuts = sharding is not None and before is None
    layers.place(mine, plan.seed, draws=draws, placed=shards.place if cuts else None)

    if shards.calls:
        shards.calls[NO_LAYER] = DividedCode(mesh.shard_axes).call
        if loss is not None and loss is not layers.own_loss:
            shards.calls[len(layers)] = DividedCode(mesh.shard_axes, loss).call

    def stage_on(p: StagePlan, device: torch.device) -> Stage:
        store = store_on(device, plan.offload_folder) if p.index in plan.offloading else None
        own_loss, drops = loss if p.output else None, plan.dropped_layers(p.index)
        return Stage(p, device, len(layers), own_loss, replicas, store, drops, shards.calls)

    stages = tuple(stage_on(*planned) for planned in mine)

    # 3. Say how schedules become programs: which stages recompute, offload and commit statistics.
    modules = {
        p.index: [*(step.module for step in p.steps), *modules_of_loss(loss if p.output else None)]
        for p in plans
    }
    lowering = Lowering(
        family=plan.schedule,
        ranks=plan.placement.places,
        transfers=tuple(transfer for p in plans for transfer in p.transfers),
        recompute=plan.recomputing,
        by_layers=plan.by_layers,
        offload=plan.offloading,
        commits=tuple(stage for stage, its in modules.items() if batch_norms(its)),
        posts=len(stages) < len(plans),
        reduces=replicas is not None and not plan.schedule.is_asynchronous,
    )
    engine = Engine(
        layers=layers,
        loss=loss,
        plan=plan,
        mesh=mesh,
        shared=shared,
        aside=aside,
        shards=shards,
        devices=devices,
        stage_plans=plans,
        stages=stages,
        lowering=lowering,
        places=layers.places(),
    )

    # 4. Let replicas start from the same values.
    if replicas is not None:
        replicas.partial = shards.partial
        refuse_sparse(chain.from_iterable(p.steps for p, _ in mine), shards)
        replicas.start_equal(engine.tensors(), shards.cut)
    if before is not None:
        before.is_current = False
    return engine


def _shared_parts(layers: Layers, loss: Any, plan: Plan, mesh: Mesh, cuda_graphs: bool) -> Shared:
    keep_freed_memory()
    cache_weights_per_thread()
    pools, connects = plan.batch_norm_over_replicas, plan.transport.is_between_processes
    modules = [*(step.module for step in layers), *modules_of_loss(loss)]
    warn_of_unpooled(modules, over_replicas=pools)
    warn_of_scale_history(modules)
    processes = mesh.processes_of(plan.placement)
    sums = any(len(rows) * len(rows[0]) > 1 for rows in mesh.placement.meshes)
    replicas = Replicas(mesh.replicas.tensors, pools_statistics=pools) if sums else None
    driver: AbstractDriver = (in_caller := CallerDriver(plan.threads_per_stage))
    if cuda_graphs:
        eager = ProcessDriver(mesh, plan, captures=True) if connects else in_caller
        driver = GraphDriver(eager, mesh)
    elif connects:
        driver = ProcessDriver(mesh, plan)
    elif plan.transport is not Transport.LOOPBACK:
        driver = ThreadDriver(plan.threads_per_stage, plan.timeout_s)
    splitter, lock = Splitter(mesh, processes), StepLock(is_connected=connects)
    return Shared(processes, splitter, replicas, driver, in_caller, lock)


def described(engine: Engine) -> Iterator[str]:
    """Yield one line per stage: its device or rank, layers and number of parameters."""
    here = {stage.index: str(stage.device.device) for stage in engine.stages}
    for plan in engine.stage_plans:
        index, steps = plan.index, plan.steps
        where = here.get(index, f"rank {engine.processes.rank_of(index, engine.mesh.replica)}")
        names = groupby(type(step.module).__name__ for step in steps)
        counts = ((name, len(list(group))) for name, group in names)
        kinds = [f"{name} x{count}" if count > 1 else name for name, count in counts]
        span = steps[0].name if len(steps) == 1 else f"{steps[0].name} to {steps[-1].name}"
        yield (
            f"  stage {index} on {where}: layers {span} ({', '.join(kinds)}), "
            f"{plan.num_parameters:,} parameters"
        )


def plan_after_move(engine: Engine, function: Callable[..., Any]) -> Plan:
    """Return the engine's plan with each stage on the device of its parameters.

    A stage without tensors is on the device to which `function` moves an empty one.
    """
    placement = engine.plan.placement
    names = list(placement.devices)
    for stage in engine.stages:
        modules = [step.module for step in stage.plan.steps]
        tensors = (t for m in modules for t in chain(m.parameters(), m.buffers()))
        nowhere = torch.empty(0, device=stage.device.device)
        names[stage.index] = str(next((t.device for t in tensors), function(nowhere).device))
    return replace(engine.plan, placement=replace(placement, devices=tuple(names)))
