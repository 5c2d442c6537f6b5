"""`penstock.parallelize`: plan a model for this job, and make the pipeline (Zheng et al. 2022).

plan_mesh      rank 0: make_plan() ──► plan ──► all ranks: the mesh of its placement
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.doctor.calibration.remembered import remembered
from penstock.doctor.facts import machine_id
from penstock.errors import ConfigError, check_count, shown
from penstock.launcher import end_with_launcher
from penstock.mesh import Mesh
from penstock.mesh.control import Control
from penstock.mesh.init import join_mesh, meet
from penstock.mesh.mesh import DEFAULT_TIMEOUT_S
from penstock.mesh.start import num_processes
from penstock.model.batch import batch_size as samples_of
from penstock.model.capture.capture import resolve_layers
from penstock.model.layer_list import Layer
from penstock.model.layers import Layers
from penstock.model.pytree import flatten
from penstock.pipeline import Pipeline
from penstock.planner.candidates import Constraints
from penstock.planner.checks import check_timeout
from penstock.planner.make_plan import plan_profile
from penstock.planner.mesh_plans import on_layout
from penstock.planner.parallelism import Parallelism
from penstock.planner.plan import Plan
from penstock.runtime.profiling import device_name, profile
from penstock.trace.progress import say
from penstock.trace.units import bytes_text
from penstock.types import Transport

from .target import sizes_up_to

MEASURING_S = 4.0
"""Seconds in which layers are measured, about."""


def parallelize(  # noqa: PLR0913 - the front door: each a keyword with a default
    model: "nn.Module | Sequence[nn.Module | Layer] | Layers",
    example_inputs: Any,
    *,
    batch_size: int | None = None,
    loss: Any = None,
    cluster: Cluster | None = None,
    num_microbatches: int | None = None,
    num_layers: int | None = None,
    sharding: str = "auto",
    measure: bool | Literal["auto"] = "auto",
    parallelism: Parallelism | None = None,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: torch.device | str | None = None,
    **options: Any,
) -> Pipeline:
    """Plan how to run a model on the devices of this job, and make the pipeline.

        pipe = penstock.parallelize(model, inputs, loss=loss)     # under torchrun, or alone
        print(pipe.plan)

    Layers are cut into stages on some devices each, which divide the stage's operators, or its
    samples.  Of the plans that fit, it takes the fastest by simulation.  In a job of processes
    rank 0 plans, and the others wait without a deadline.  A process is idle if more devices would
    not make a step faster.  All processes give a step the same batch.

    The search is a quick one, so that a job begins soon: meshes whose sizes are powers of two or
    divide a host, and numbers of micro-batches around the best.  `penstock.plan` looks at more;
    `Pipeline(plan=)` takes what it finds.

    Args:
        model: as `Pipeline` takes it.
        example_inputs: a batch; only shapes and dtypes count.
        batch_size: the samples of a step; default: those of `example_inputs`.
        loss: as `Pipeline` takes it.
        cluster: the devices, in the order of ranks; default: this machine, which is measured for
            about 10 s the first time (`measure_cluster`).
        num_microbatches: M, if it is decided already.
        num_layers: into how many the model's layers are clustered before stages are cut at their
            ends (Alpa's L); default: all stay, or 128 where there are more.
        sharding: the ready plan by which operators are divided.
        measure: True: rank 0 first times each layer where it is, for a few seconds in all; the
            estimates of its operators are scaled by that.  False: operators are counted, and a
            roofline estimates.  "auto": True if the layers have values, on the kind of device
            that the cluster has.
        parallelism: a layout to take as it is; of the batch, the micro-batches are its own.
        seed: of the layers' random streams.
        timeout_s: deadline of every wait between processes, in seconds.
        device: what this process computes on, as for `init_mesh`.
        options: other arguments of `Pipeline` that a plan does not decide.

    Raises:
        ConfigError: the cluster has another number of devices than there are processes; the
            processes were given different arguments; the model has fewer layers than
            `num_layers`; layers to measure have no values, or are on another kind of device.
        PlanError: nothing fits; says what is missing.
    """
    # 1. Check the arguments, on all processes alike, before any waits for another.
    end_with_launcher()
    timeout_s = check_timeout(timeout_s)
    layers = resolve_layers(model, example_inputs)
    num_samples = samples_of(example_inputs, "example_inputs")
    batch_size = num_samples if batch_size is None else check_count("batch_size", batch_size)
    if batch_size != num_samples:
        raise ConfigError(
            f"batch_size={batch_size}, and example_inputs hold {num_samples} samples; give a "
            "batch of as many, on the meta device if it is large"
        )
    if num_layers is not None:
        check_count("num_layers", num_layers)
    if cluster is not None:
        cluster.check_devices(num_processes())
    if measure not in (True, False, "auto"):
        raise ConfigError(f'measure={shown(measure)}; give True, False or "auto"')
    if measure is True:
        check_measurable(layers, example_inputs, cluster)
    numbers = {"num_microbatches": num_microbatches, "num_layers": num_layers}
    decided: dict[str, Any] = {**numbers, "sharding": sharding, "measure": measure}
    decided["parallelism"] = parallelism

    # 2. Plan on rank 0, and join the mesh of the plan.
    def make_plan() -> Plan:
        devices = cluster or measure_cluster(num_processes())
        return plan_for(layers, example_inputs, devices, **decided)

    mesh, plan = plan_mesh(
        make_plan,
        cluster=cluster,
        same={"batch_size": batch_size, **decided, "parallelism": str(parallelism)},
        timeout_s=timeout_s,
        device=device,
    )
    # 3. Make this process's part of the pipeline.
    plan = replace(plan, seed=seed, timeout_s=timeout_s)
    return Pipeline(
        layers, plan=plan, mesh=mesh, loss=loss, example_inputs=example_inputs, **options
    )


def plan_for(  # noqa: PLR0913 - as `parallelize`
    layers: Any,
    example_inputs: Any,
    cluster: Cluster,
    *,
    num_microbatches: int | None = None,
    num_layers: int | None = None,
    sharding: str = "auto",
    measure: bool | Literal["auto"] = False,
    parallelism: Parallelism | None = None,
) -> Plan:
    """Plan a model for a job with one process for each device of a cluster.

    It needs no device, except to `measure`: the first one.  Arguments and errors are those of
    `parallelize`.  Devices that would not make a step faster stay unused.
    """
    # 1. Profile the layers for a few sizes of micro-batches.
    layers = resolve_layers(layers, example_inputs)
    count, batch_size = len(cluster.places), samples_of(example_inputs, "example_inputs")
    sizes: Sequence[int] = sizes_up_to(batch_size)
    if parallelism is not None:
        sizes = (parallelism.rows(cluster) * parallelism.microbatch_size,)
    costs = _profiled(layers, example_inputs, cluster, sizes, measure)
    # 2. Choose the plan; number its ranks by the devices of the cluster, idle ones included.
    constraints = Constraints(
        batch_size=batch_size,
        num_replicas=1,  # replicas need samples of their own, and all processes get one batch
        num_microbatches=num_microbatches,
        transport=Transport.TORCH_DISTRIBUTED if count > 1 else None,
    )
    if parallelism is not None:
        plan = on_layout(parallelism, costs, cluster, batch_size).plan
    else:
        options: dict[str, Any] = {"constraints": constraints, "sharding": sharding, "quick": True}
        plan = plan_profile(costs, cluster, batch_size, num_layers=num_layers, **options).plan
    return replace(plan, placement=plan.placement.among(count)) if count > 1 else plan


def _profiled(
    layers: Layers,
    inputs: Any,
    cluster: Cluster,
    sizes: Sequence[int],
    measure: bool | Literal["auto"],
) -> Profile:
    """Measure the layers, or count their operators; "auto": count them if memory is short."""
    counted = partial(profile, layers, inputs, microbatch_sizes=sizes, measure=False, threads=1)
    counted = partial(counted, torch_type=cluster.device_of(0).torch_type)
    if not measure or (measure == "auto" and not is_measurable(layers, inputs, cluster)):
        return counted()
    try:
        return profile(layers, inputs, microbatch_sizes=sizes, budget_s=MEASURING_S, threads=1)
    except torch.OutOfMemoryError:
        if measure is True:
            raise
    say("the layers are not measured: their device lacks the memory for the whole batch")
    return counted()


def check_measurable(layers: Layers, inputs: Any, cluster: Cluster | None) -> None:
    """Check that layers and inputs have values, on the kind of device that is planned for."""
    kinds = sorted({device.type for device in _devices_of(layers, inputs)})
    kind = kinds[0] if cluster is None else cluster.device_of(0).torch_type
    if kinds != [kind] or kind == "meta":
        raise ConfigError(
            f"measure=True runs the layers where they are, and model and inputs are on "
            f"{' and '.join(kinds)}; give both on {'one device' if cluster is None else kind}, "
            "or measure=False, by which seconds are estimated"
        )


def is_measurable(layers: Layers, inputs: Any, cluster: Cluster) -> bool:
    """Tell whether layers and inputs have values on the only kind of device in a cluster."""
    here = {(device.type, device_name(device)) for device in _devices_of(layers, inputs)}
    planned = {(device.torch_type, device.name) for device in cluster.devices.values()}
    return len(here) == 1 and here == planned


def _devices_of(layers: Layers, inputs: Any) -> set[torch.device]:
    modules = (step.module for step in layers)
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    tensors += [leaf for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor)]
    return {tensor.device for tensor in tensors}


def measure_cluster(num_devices: int = 1, *, renew: bool = False) -> Cluster:
    """Measure this machine; return it as a cluster of `num_devices`, one for each process.

    The figures are kept in a file, and later calls read them: docs/clusters.md.

    Args:
        num_devices: if there are more than the machine has, they share its devices.
        renew: measure again, whatever was kept.
    """
    machine = remembered(num_devices, renew=renew)
    (host,) = machine.hosts
    devices = tuple(host.devices[n % len(host.devices)] for n in range(num_devices))
    return replace(machine, hosts=(replace(host, devices=devices),)).between_processes()


def plan_mesh(
    make_plan: Callable[[], Plan],
    *,
    cluster: Cluster | None = None,
    same: Mapping[str, Any] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: torch.device | str | None = None,
) -> tuple[Mesh, Plan]:
    """Meet the other processes, let rank 0 plan, and join the mesh of the plan.

    The others wait however long rank 0 plans.  A process that is alone runs all stages.

    Args:
        make_plan: called on rank 0 only, for as many devices as processes.
        cluster: what the plan is made for; compared with what the processes run on.
        same: values that all processes must have been given alike, by name.
        timeout_s: deadline of every wait between processes, in seconds.
        device: what this process computes on, as for `init_mesh`.

    Raises:
        ConfigError: the cluster is not what the processes run on, or `same` differs; on all alike.
        PenstockError: what `make_plan` raises; on all alike.
        MeshError: the processes do not find each other in time.
    """
    # 1. A process that is alone needs no other.
    count = num_processes()
    if cluster is not None:
        cluster.check_devices(count)
    if count == 1:
        plan = make_plan()
        return Mesh.of_one_process(plan.placement.num_places, timeout_s), plan
    # 2. Meet, and let rank 0 plan; an error on one rank is raised on all.
    world, place = meet(dict(same or {}), timeout_s, device)
    with world.reporting():
        if cluster is not None:
            check_hosts(cluster, world, place)
        text = world.from_first(lambda: make_plan().to_json(), "for rank 0 to plan")
    # 3. All ranks read the plan from its text, so that they have the same to the bit.
    plan = Plan.from_json(text)
    placement = plan.placement.among(world.size)
    plan = replace(plan, placement=placement, transport=Transport.TORCH_DISTRIBUTED)
    return join_mesh(world, plan.placement, place), plan


def check_hosts(cluster: Cluster, world: Control, device: torch.device) -> None:
    """Check that a cluster describes the hosts and devices of this job; all processes call it.

    Ranks on one host of the cluster must be on one host, on devices of the described kind with at
    least the described memory.  Several hosts of the cluster may be one here, to try a plan.

    Raises:
        ConfigError: on all processes alike; says which rank differs, and how.
    """
    cluster.check_devices(world.size)
    memory = 0
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    facts = [machine_id(), socket.gethostname(), device.type, memory]
    of_ranks = world.gather(facts, "to see whether the cluster is what the processes run on")
    for difference in _differences(cluster, of_ranks):
        raise ConfigError(
            f"the cluster {cluster.name} is not what this job runs on: {difference}. Describe it "
            "as it is (penstock doctor --calibrate), with devices in the order of ranks"
        )


def _differences(cluster: Cluster, of_ranks: Sequence[Any]) -> Iterator[str]:
    first: dict[int, int] = {}
    for rank, (place, facts) in enumerate(zip(cluster.places, of_ranks, strict=True)):
        machine, host, kind, memory = facts
        before = first.setdefault(place.host, rank)
        other, name, *_ = of_ranks[before]
        if other != machine:
            yield (
                f"ranks {before} and {rank} are on one host there, {place.host_name}, and here on "
                f"two, {name} and {host}"
            )
        described = cluster.device_of(rank)
        if described.torch_type != kind:
            yield (
                f"rank {rank} has a device of kind {described.torch_type!r} there, and computes "
                f"on {kind!r}"
            )
        if memory and memory < 0.9 * described.memory_bytes:  # some of it is the driver's
            yield (
                f"the device of rank {rank} has {bytes_text(int(described.memory_bytes))} there, "
                f"and {bytes_text(memory)} here"
            )
