"""Choose the sharding of a model's operators, for a pipeline or to print it."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor, nn

from penstock.costs.cluster import Cluster
from penstock.costs.counting.count import record_graph
from penstock.costs.counting.graph import Graph
from penstock.errors import ConfigError, check_count
from penstock.mesh import Mesh
from penstock.model.capture.capture import resolve_layers
from penstock.model.layer_list import Layer
from penstock.model.layers import Layers
from penstock.model.pytree import flatten, unflatten
from penstock.planner.plan import Plan
from penstock.planner.plan_sharding import divide, sharding_of
from penstock.sharding.costs import Costs
from penstock.sharding.plan import LayerSharding, Sharding
from penstock.sharding.request import ShardingRequest
from penstock.trace.units import count_text

from .microbatches import LossFunction, first_microbatch


def shard(  # noqa: PLR0913 - the front door: each a keyword with a default
    layers: "nn.Module | Sequence[nn.Module | Layer] | Layers",
    example_inputs: Any,
    num_shards: int | tuple[int, ...],
    *,
    sharding: str | Mapping[str, Any] = "auto",
    num_microbatches: int = 1,
    memory_limit_bytes: int | None = None,
    cluster: Cluster | None = None,
) -> Sharding:
    """Choose the best sharding of a model's operators; this needs no devices.

        print(penstock.shard(model, inputs, num_shards=8))

    The table has for each operator the layouts of its arguments and results, the bytes that a
    device sends for it, and the seconds per micro-batch that its next best layout would add.  The
    model may be on the meta device; the call restores it.

    Args:
        layers: as `Pipeline` takes them, as one stage.
        example_inputs: a batch; only shapes and dtypes count.
        num_shards: devices that share the model; several numbers are the lengths of their axes.
        sharding: as `Pipeline` takes it (docs/sharding.md).
        num_microbatches: micro-batches per batch; they share a step's sums of gradients.
        memory_limit_bytes: bytes per device for weights, gradients, optimizer state (twice the
            weights) and activations of all micro-batches.
        cluster: the devices, neighbours along the last axis; default: hosts of eight A100s.

    Raises:
        ConfigError: an argument cannot work, or a layer cannot be recorded.
        PlanError: nothing stays below the limit; says by how much.
    """
    # 1. Check the sizes and the request.
    axes = num_shards if isinstance(num_shards, tuple) else (num_shards,)
    count = prod(check_count("num_shards", number) for number in axes)
    check_count("num_microbatches", num_microbatches)
    if cluster is not None and count > len(cluster.places):
        raise ConfigError(
            f"num_shards={num_shards} asks for {count_text(count, 'device')}, and the cluster has "
            f"{len(cluster.places)}; give fewer, or cluster.times(hosts)"
        )
    wanted = ShardingRequest.of(sharding)
    if memory_limit_bytes is not None:
        wanted = ShardingRequest(wanted.plan, wanted.weights, memory_limit_bytes)

    # 2. Record the operators of a micro-batch, and solve for their layouts.
    resolved = resolve_layers(layers, example_inputs)
    part = first_microbatch(example_inputs, num_microbatches)
    counts = num_microbatches, num_microbatches
    costs = Costs.usual(axes, *counts) if cluster is None else Costs(axes, cluster, *counts)
    names = [step.path for step in resolved]
    return divide(wanted, record_graph(resolved, part), names, costs, compares=True)


def check_sharding(plan: Plan, part: Any) -> None:
    """Refuse a sharding that cannot be planned.

    Raises:
        ConfigError: example inputs are missing (`part` is their first micro-batch); the name is
            unknown; or it keeps gathered weights in a step that updates them.
    """
    if plan.sharding is None:
        return
    from penstock.sharding.named import ready_plan  # the solver takes a while to import

    # Weights gathered once per step would be older than the updates within it.
    name = ShardingRequest.of(plan.sharding).plan
    num_shards = plan.placement.most_shards
    ready = ready_plan(name)
    if plan.schedule.is_asynchronous and (ready.gathers or ready.keeps):
        raise ConfigError(
            f"sharding={name!r} gathers weights once for a step, within which the schedule "
            f"{plan.schedule.name} updates them; use 'zero3', which gathers them for each layer, "
            "or a synchronous schedule"
        )
    if part is None and num_shards > 1:
        raise ConfigError(
            f"sharding={name!r} needs example_inputs=: the operators of the layers are recorded "
            "with them"
        )
    if num_shards == 1 and not ready.gathers:
        raise ConfigError(
            f"sharding={name!r} divides operators among the shards of a stage, and there is one; "
            "use init_mesh(num_shards=), or sharding='zero1', which cuts weights between steps "
            "along replicas"
        )


def make_sharding(
    plan: Plan, layers: Layers, part: Any, mesh: Mesh, loss: LossFunction | None
) -> Sharding | None:
    """Return the sharding of all layers; None without a sharding.

    With a loss the output may leave the last layer in slices.

    All processes of the mesh choose the same one, for the micro-batch sizes of rank 0.

    Raises:
        ConfigError: a layer cannot be recorded, or processes differ in its operators or in their
            example inputs.
        PlanError: a layer does not allow the sharding.
    """
    if plan.sharding is None:
        return None
    meshes = [plan.placement.shard_axes_of(stage) for stage in range(plan.num_stages)]
    if max(map(prod, meshes)) == 1:
        whole = (LayerSharding(step.path, (), {}) for step in layers)
        return Sharding(((1,),), tuple(whole), gathers=True)
    graph = record_graph(layers, _sized_as_first(part, mesh))
    names = [step.path for step in layers]
    mesh.world.require_same("Pipeline", dict(_operators(graph, names)))
    return sharding_of(plan, graph, names, to_loss=loss is not None)


def _operators(graph: Graph, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield facts of each layer that must be equal on all processes: functions, then arguments."""
    for layer, name in enumerate(names):
        functions = (call.function.rpartition(".")[2] for call in graph.of_layer(layer))
        yield f"what layer {name} calls", ", ".join(functions)
    for layer, name in enumerate(names):
        yield f"the arguments of what layer {name} calls, by their digest", graph.signature(layer)


def _sized_as_first(part: Any, mesh: Mesh) -> Any:
    """Return a micro-batch of the sizes on rank 0, without values.

    Replicas may have fewer or shorter samples, but their slices must begin at the same places.
    """
    leaves, structure = flatten(part)
    mine = [[str(t.dtype), list(t.shape)] for t in leaves if isinstance(t, Tensor)]
    first = mesh.world.broadcast(mine, 0, "for the sizes of the example inputs")
    if [(dtype, len(shape)) for dtype, shape in mine] != [(d, len(s)) for d, s in first]:
        raise ConfigError(
            f"example_inputs= are tensors of other types or dimensions, {mine}, than those of "
            f"rank 0, {first}; give all processes inputs of one kind: only sizes may differ"
        )
    if mine == first:
        return part
    sizes = iter(shape for _, shape in first)
    sized = [
        leaf.new_empty(next(sizes), device="meta", requires_grad=leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]
    return unflatten(structure, sized)
