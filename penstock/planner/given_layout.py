"""The step of a given layout: its stages on their meshes, priced as the planner prices its own."""

from collections.abc import Sequence
from functools import partial
from math import prod

from penstock.costs.cluster import Cluster
from penstock.costs.counting.graph import Graph
from penstock.costs.profile import Profile
from penstock.errors import ConfigError
from penstock.sharding.letters import base_name

from .mesh_candidates import OnMeshes
from .mesh_costs import MeshPrices
from .mesh_task import MeshTask
from .parallelism import Parallelism, near_divisors
from .stage_table import Stage, Submesh
from .submeshes import Answer

_ATTENTION = "scaled_dot_product_attention"


def on_layout(
    parallelism: Parallelism, profile: Profile, cluster: Cluster, batch_size: int | None = None
) -> OnMeshes:
    """Return a layout with its predicted step, memory and plan.

    Raises:
        ConfigError: the layout does not divide the heads, layers, batch or devices; the profile is
            from a file, which has no operators.
    """
    # 1. Divide the devices, the batch and the layers.
    if profile.operators is None:
        raise ConfigError(
            f"nobody knows the operators of {profile.name}, which a layout divides; give the "
            "model instead of a profile from a file"
        )
    rows = parallelism.rows(cluster)
    number = parallelism.microbatches(rows, batch_size)
    samples = parallelism.microbatch_size * rows * number
    task = MeshTask.of(profile, cluster, samples, number)
    graph = task.graph_of(number)
    _check_heads(parallelism, graph, task.names)
    meshes = meshes_of(parallelism, cluster, rows)
    places = [n % parallelism.pipeline for n in range(parallelism.num_stages)]
    ends = parallelism.stages(profile.layers)
    stages = tuple(Stage(*own, meshes[place]) for own, place in zip(ends, places, strict=True))
    # 2. Price each stage on its mesh, and simulate the schedule.
    prices = MeshPrices(
        graph,
        task.names,
        profile.spans,
        cluster,
        number,
        plan=parallelism.sharding(rows),
        policy=parallelism.policy,
        factors=task.factors_of(number),
        state=task.state,
    )
    answer = Answer(stages, 0.0, tuple(own.submesh.devices for own in stages))
    of_stages = partial(prices.of_stages, is_1f1b=False)
    own = OnMeshes(task, answer, parallelism.family, prices, of_stages, given=str(parallelism))
    return own.simulated()


def meshes_of(parallelism: Parallelism, cluster: Cluster, rows: int) -> list[Submesh]:
    """Return the mesh of each rank of the pipeline, in order of devices.

    Raises:
        ConfigError: one has devices of several kinds.
    """
    shape, meshes = parallelism.shape(rows), []
    size = prod(shape)
    kinds = [kind for kind, host in enumerate(cluster.hosts) for _ in range(host.count)]
    for first in range(0, parallelism.pipeline * size, size):
        devices = tuple(range(first, first + size))
        hosts = sorted({cluster.places[n].host for n in devices})
        of_mesh = sorted({cluster.places[n].kind for n in devices})
        if len(of_mesh) > 1:
            raise ConfigError(
                f"devices {first} to {first + size - 1} of {cluster.name} are of several kinds, "
                f"{' and '.join(of_mesh)}; give a layout whose meshes have one kind each"
            )
        meshes.append(Submesh(kinds[hosts[0]], len(hosts), size, devices, shape))
    return meshes


def _check_heads(parallelism: Parallelism, graph: Graph, names: Sequence[str]) -> None:
    """Raise a ConfigError if the heads of attention do not divide among the devices."""
    for call in graph.calls if parallelism.tensor > 1 else ():
        if base_name(call.function) != _ATTENTION:
            continue
        for tensor in call.takes[:2]:  # queries, and keys, of which there may be fewer
            heads = graph.tensors[tensor].shape[-3]
            if heads % parallelism.tensor:
                raise ConfigError(
                    f"tensor={parallelism.tensor} does not divide the {heads} heads of layer "
                    f"{names[call.layer]!r}; {near_divisors(parallelism.tensor, heads)}"
                )
