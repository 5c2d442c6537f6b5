"""Make the plan of a pipeline, and agree on it between processes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from penstock.costs.cluster.files import device_preset
from penstock.costs.counting.count import count_layers
from penstock.costs.counting.layer_weights import gradient_bytes
from penstock.costs.layer_costs import by_roofline
from penstock.costs.layer_facts import LayerFacts
from penstock.costs.measuring.measure import TO_BALANCE, How, measure
from penstock.errors import ConfigError, PlanError, check_kind, shown
from penstock.mesh import Mesh
from penstock.mesh.start import accelerators
from penstock.model.capture.capture import resolve_layers
from penstock.model.layers import Layers
from penstock.model.pytree import tree_map
from penstock.model.stage_plan import Step
from penstock.planner.arguments import (
    Arguments,
    Model,
    Resources,
    Undecided,
    check_named_layers,
    resolve,
    resolve_num_stages,
    resolve_threads,
    resolve_transport,
)
from penstock.planner.balance import Measured, balanced, least_recompute
from penstock.planner.plan import Plan
from penstock.planner.shared_cores import num_cores
from penstock.planner.unsplit import Unsplit
from penstock.trace.progress import saying
from penstock.trace.units import count_text

from .batch_norm import batch_norms, separate_statistics
from .caller import CallerContext
from .devices import free_bytes, why_missing, with_index
from .microbatches import Batch
from .random.drawing import Drawing, LayerCall
from .run import Run, Streams
from .stage.split_backward import divide
from .stage.tape import Tape
from .unsplit import left_bytes, why_unsplit


class StageCalls:
    """Calls layers as a stage does: with their random streams, and BatchNorm moments dropped."""

    def __init__(self, layers: Layers) -> None:
        modules = [(step.index, step.module) for step in layers]
        self._norms = {index: batch_norms([module]) for index, module in modules}
        tensors = (t for _, m in modules for t in (*m.parameters(), *m.buffers()))
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        self._drawing = Drawing(modules, device)
        self._run = Run(
            batch=Batch([1], [], [], [1.0]),
            streams=Streams(0, "train", 0, 1),
            caller=CallerContext.capture(False, [device]),
        )

    def __call__(self, step: Step, function: Callable[[], Any]) -> Any:
        """Call one layer."""
        training = step.module.training
        with separate_statistics(self._norms.get(step.index, ()), into={}):
            if (step.index, training) in self._drawing.silent:
                return function()
            call = LayerCall(self._run, Tape(0, {}, graph_dropped=False), step.index, training)
            return self._drawing.run(call, function)


Devices = Sequence[torch.device | str | int] | torch.device | str | None


def make_plan(arguments: Arguments, plan: Plan | None, layers: Layers, mesh: Mesh | None) -> Plan:
    """Return the plan for the user's arguments, or the user's plan after checking it.

    Raises:
        ConfigError: an argument cannot work, does not fit the mesh, or comes beside a plan.
        PartitionError: the layers do not allow the partition.
        PlanError: the plan is for another model, other ranks, or devices that are missing.
    """
    # 1. Resolve the arguments into a plan.
    resources = _resources(mesh)
    if plan is None:
        num_stages = resolve_num_stages(arguments, resources)
        if arguments.partition is None:
            layers.check_enough(num_stages)
        return resolve(arguments, num_stages, Model(facts_of(layers), layers.spans), resources)
    if not isinstance(plan, Plan):
        raise PlanError(
            f"plan={plan!r:.80}; it must be a penstock.Plan, such as penstock.Plan.load(path) "
            "reads from a file"
        )
    # 2. Or check a given plan against the model, the mesh and this host.
    arguments.check_none_beside_plan()
    plan.check_model(facts_of(layers))
    check_named_layers(plan)
    plan.check_ranks(mesh.world_size if mesh is not None else 1, resources.num_places)
    for stage, name in enumerate(plan.placement.devices):
        _check_device(stage, name, mesh)
    threads = resolve_threads(plan.threads_per_stage, plan.placement.places, resources)
    transport = resolve_transport(plan.transport, resources)
    return replace(plan, threads_per_stage=threads, transport=transport)


def facts_of(layers: Layers) -> tuple[LayerFacts, ...]:
    """Describe the layers of a model, so that a plan runs on no other model."""
    return tuple(
        LayerFacts.of(
            step.name,
            type(step.module).__name__,
            count,
            {name: p.shape for name, p in step.module.named_parameters()},
        )
        for step, count in zip(layers, layers.parameter_counts(), strict=True)
    )


def layer_facts(layers: Any) -> tuple[LayerFacts, ...]:
    """Describe the layers of a model, so that a plan runs on no other model.

        plan.check_model(penstock.layer_facts(layers))

    Args:
        layers: an nn.Sequential, a list of modules or `Layers`; on the meta device, too.
    """
    return facts_of(resolve_layers(layers, None))


MEMORY_SHARE = 0.8
"""Of the free memory of an accelerator, the share for weights and activations by default."""
_USUAL_DEVICE = "a100-80gb"
"""The device whose roofline weighs counted layers against each other."""


def balance(plan: Plan, layers: Layers, part: Any, free: Sequence[int] | None = None) -> Plan:
    """Measure the layers on a micro-batch; return a balanced plan within the memory limit.

    With `free`, the free bytes of each rank's device, the plan gets the cheapest recompute policy
    for which these suffice.  A ConfigError names a rank that needs more memory than the limit.
    """
    devices = {t.device for step in layers for t in step.module.parameters()}
    if layers.model is not None and len(devices) > 1:
        return _balanced_by_counting(plan, layers, part, free)
    if layers.model is not None and devices:
        (device,) = devices
        part = tree_map(lambda tensor: tensor.to(device), part)
    with saying(f"measuring the layers, to balance {count_text(plan.num_stages, 'stage')}"):
        unsplit: list[Unsplit] = []

        def look(step: Step, results: list[Tensor]) -> None:
            roots = [result for result in results if result.requires_grad]
            unsplit.extend(why_unsplit([(step.index, step.module)], divide(roots, set())))

        how = How(threads=plan.threads_per_stage, call=StageCalls, repeats=TO_BALANCE)
        left = left_bytes if plan.memory_limit_bytes is not None or free else None
        result = measure(layers, part, how, look=look, left=left)
    plan = replace(plan, unsplit=tuple(unsplit))
    times = tuple(result.seconds(step.index) for step in layers)
    if result.kept is None:
        return balanced(plan, Measured(times), layers.spans)
    measured = Measured(times, result.kept, _trainable_bytes(layers))
    return _balanced(plan, measured, layers, free)


def _balanced(plan: Plan, measured: Measured, layers: Layers, free: Sequence[int] | None) -> Plan:
    if plan.memory_limit_bytes is not None or not free:
        return balanced(plan, measured, layers.spans)
    plan = balanced(plan, replace(measured, kept=None), layers.spans)
    return least_recompute(plan, measured, _room(plan, layers, free))


def _balanced_by_counting(
    plan: Plan, layers: Layers, part: Any, free: Sequence[int] | None
) -> Plan:
    """Balance a captured model whose layers are on several devices by counted operators.

    No device has all values that the code between its layers uses, so that it cannot be measured.
    """
    counted = count_layers(layers, part, left=left_bytes)
    device = device_preset(_USUAL_DEVICE)
    times = [by_roofline(counted.layer(step.index), device) for step in layers]
    plan = _balanced(plan, Measured(times, counted, _trainable_bytes(layers)), layers, free)
    return replace(plan, predicted_s=None)


def _room(plan: Plan, layers: Layers, free: Sequence[int]) -> list[int]:
    """Return the bytes that each rank's device has for activations, beside weights and Adam."""
    room = [round(MEMORY_SHARE * num_bytes) for num_bytes in free]
    trained = _trainable_bytes(layers)
    gradients = _trainable_bytes(layers, plan.gradient_dtype)
    ends = [0, *accumulate(plan.partition)]
    for place, (start, end) in zip(plan.placement.places, pairwise(ends), strict=True):
        # Each weight itself and Adam's two moments, and its gradient.
        room[place] -= 3 * sum(trained[start:end]) + sum(gradients[start:end])
    return [max(1, num_bytes) for num_bytes in room]


def free_of_ranks(plan: Plan, mesh: Mesh) -> list[int] | None:
    """Return the free bytes of the device of each rank of a pipeline; None with CPUs.

    Ranks that share a device share its memory; of a place with several processes the least counts.
    """
    placement = plan.placement
    if mesh.processes is not None:
        mine = free_bytes(mesh.device)
        if mine is None:
            return None
        free = mesh.world.gather(mine, "for the free memory of the devices")
        return [min(free[rank] for rank in chain(*rows)) for rows in placement.meshes]
    device_of = dict(zip(placement.places, stage_devices(plan, mesh), strict=True))
    sharing = Counter(device_of.values())
    found = {device: free_bytes(device) for device in sharing}
    known = {device: n // sharing[device] for device, n in found.items() if n is not None}
    if len(known) < len(found):
        return None
    return [known[device_of[place]] for place in range(placement.num_places)]


def _trainable_bytes(layers: Layers, dtype: str | None = None) -> list[int]:
    """Return the bytes of each layer's trainable weights, or of gradients in a wider dtype; a
    shared one counts in its first layer.
    """
    counted: set[Tensor] = set()
    num_bytes = []
    for step in layers:
        new = {p for p in step.module.parameters() if p.requires_grad} - counted
        counted |= new
        num_bytes.append(gradient_bytes(new, dtype))
    return num_bytes


def agree(
    plan: Plan,
    layers: Layers,
    mesh: Mesh,
    part: Any,
    alike: Mapping[str, Any],
    undecided: Undecided,
) -> tuple[Plan, int, Undecided]:
    """Agree on the plan for all processes; it is final, since each keeps its own layers only.

    What is `undecided` rank 0 decides, by measuring the micro-batch `part`, if its layers have
    values.  `alike` are further arguments that must be equal on all processes.  A ConfigError
    refuses processes that make different pipelines, or in another order.

    Returns:
        The plan of rank 0; the number of pipelines made before this one on the mesh; and what
        the first batch may still decide, in a process that runs all stages.
    """
    limits = plan.memory_limit_bytes is not None
    if mesh.world_size == 1:
        may_balance = undecided.balance and (plan.num_stages > 1 or limits)
        return plan, 0, replace(undecided, balance=may_balance)
    # 1. Refuse processes with different arguments.
    before = {"number of pipelines made before": len(mesh.world.pipelines)}
    mesh.world.require_same("Pipeline", {**before, **_facts(plan), **alike})
    # 2. Let rank 0 measure the layers, while it still has all of them.
    modules = [step.module for step in layers]
    tensors = chain.from_iterable(chain(m.parameters(), m.buffers()) for m in modules)
    is_measured = undecided.balance and mesh.is_first_rank and part is not None
    relaxes = undecided.balance and undecided.recompute  # else nothing is measured to use it
    free = free_of_ranks(plan, mesh) if relaxes else None
    if is_measured and not any(t.is_meta for t in tensors):
        plan = balance(plan, layers, part, free)
    elif limits and undecided.balance and mesh.is_first_rank:
        raise ConfigError(
            "memory_limit_bytes= needs example_inputs= between processes, and layers with values: "
            "what layers keep is measured before each process keeps its own only"
        )
    # 3. Broadcast the decisions of rank 0.
    decided_names = (
        *("partition", "predicted_s", "threads_per_stage", "offload", "predicted_peak_bytes"),
        *("unsplit", "balanced_by", "recompute"),
    )
    decided = {name: getattr(plan, name) for name in decided_names}
    decisions = mesh.world.broadcast(decided, 0, "for the partition of the layers")
    plan = replace(plan, **decisions)
    num_parameters = sum(layer.num_parameters for layer in plan.layers)
    description = f"{len(plan.layers)} layers, {num_parameters:,} parameters"
    return plan, mesh.world.number_pipeline(description), Undecided()


_NOT_COMPARED = frozenset({"layers", "threads_per_stage", "offload_folder"})
"""Fields of a plan that may differ between processes; layers are compared one by one."""


def _facts(plan: Plan) -> dict[str, Any]:
    """Return the fields of a plan that processes compare, with one field per layer.

    `plan.to_json()` has them too, but refuses a schedule that is the user's own function.
    """
    facts = {f.name: getattr(plan, f.name) for f in fields(plan) if f.name not in _NOT_COMPARED}
    layers = {f"layer {n}": layer for n, layer in enumerate(plan.layers)}
    return {**layers, **facts, "schedule": str(plan.schedule)}


def device_names(devices: Devices, mesh: Mesh | None) -> tuple[str, ...] | str | None:
    """Return the names of the user's devices; None if there are none.

    A ConfigError refuses what is no mesh, a device that is missing, and `devices` beside a mesh
    with several processes, which each have their own.
    """
    check_kind("mesh", mesh, (Mesh, type(None)), "what penstock.init_mesh(...) returns")
    if devices is None:
        return None
    if mesh is not None and mesh.own_device is not None:
        return device_of_process(devices, mesh.own_device)
    for device in _listed(devices):
        reason = why_missing(device)
        if reason:
            raise ConfigError(
                f"devices={shown(devices)}: {reason}; give devices that it has, or leave devices "
                "out"
            )
    names = tuple(str(with_index(torch.device(device))) for device in _listed(devices))
    return names if isinstance(devices, list | tuple) else names[0]


def _listed(devices: Any) -> list[Any]:
    return list(devices) if isinstance(devices, list | tuple) else [devices]


def device_of_process(devices: Devices, own_device: torch.device) -> str:
    """Return the type of `own_device`, where all stages run; ConfigError for other `devices`."""
    asked = _listed(devices)
    names = ("cuda" if isinstance(d, int) else str(d or own_device) for d in asked)
    if {name.partition(":")[0] for name in names} - {own_device.type}:
        raise ConfigError(
            f"devices={devices!r}, but this mesh has several processes, and the stages of each "
            f"run on its own device, {own_device}. Leave devices out, and give "
            "init_mesh(device=...), or use one process (no torchrun), where each stage can have "
            "a GPU of this host"
        )
    return own_device.type


def stage_devices(plan: Plan, mesh: Mesh) -> tuple[torch.device, ...]:
    """Return the device of each stage; in a mesh of processes, this process's device for all."""
    if mesh.own_device is not None:
        return (mesh.own_device,) * plan.num_stages
    return tuple(map(torch.device, plan.placement.devices))


def _check_device(stage: int, name: str, mesh: Mesh | None) -> None:
    own_device = None if mesh is None else mesh.own_device
    if own_device is None:
        reason = why_missing(name)
    elif name.partition(":")[0] != own_device.type:
        reason = f"this process computes on {own_device}"
    else:
        return
    if reason:
        raise PlanError(
            f"the plan has stage {stage} on {name!r}, and {reason}; change placement.devices in "
            "the plan"
        )


def _resources(mesh: Mesh | None) -> Resources:
    """Return the threads, cores, devices and transports that a pipeline may use.

    A ConfigError refuses a mesh with more replicas of some stages than of others.
    """
    used = mesh or Mesh.of_one_process()
    replicas = {len(of_place) for of_place in used.placement.meshes}
    if len(replicas) > 1:
        raise ConfigError(
            f"stages of the mesh have {sorted(replicas)} replicas, and a pipeline has as many of "
            "each; give a stage more shards instead: they may share the samples of a micro-batch "
            '(sharding="data")'
        )
    return Resources(
        num_threads=torch.get_num_threads(),
        num_cores=num_cores(),
        devices=accelerators() if used.own_device is None else (used.own_device.type,),
        placement=None if mesh is None else used.placement,
        transports=used.transports,
    )
