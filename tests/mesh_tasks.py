"""Tasks of planning stages on meshes, with the seconds of a roofline."""

from functools import cache
from typing import Any

from penstock import Cluster
from penstock.costs.counting.count import record_graph
from penstock.model.batch import batch_size
from penstock.model.capture.capture import resolve_layers
from penstock.planner.arguments import Model
from penstock.planner.clustering import cluster_layers
from penstock.planner.make_plan import choose_on_meshes
from penstock.planner.mesh_costs import MeshPrices, OnMesh
from penstock.planner.mesh_task import SHARDINGS, MeshTask
from penstock.planner.plan import Plan
from penstock.planner.submeshes import Stage, Submesh
from penstock.runtime.microbatches import first_microbatch
from penstock.runtime.planning import facts_of


def mesh_task(
    layers: Any,
    example_inputs: Any,
    cluster: Cluster,
    num_microbatches: int | None = None,
    sharding: str = "auto",
    num_layers: int | None = None,
) -> MeshTask:
    """Return the task of planning layers on a cluster."""
    resolved = resolve_layers(layers, example_inputs)

    @cache
    def graph_of(number: int) -> Any:
        return record_graph(resolved, first_microbatch(example_inputs, number))

    first = num_microbatches or 1
    spans = cluster_layers(graph_of(first), resolved.spans, cluster, num_layers)
    return MeshTask(
        model=Model(facts_of(resolved), tuple(spans)),
        names=[step.path for step in resolved],
        graph_of=graph_of,
        cluster=cluster,
        batch_size=batch_size(example_inputs, "example_inputs"),
        num_microbatches=num_microbatches,
        shardings=SHARDINGS if sharding == "auto" else (sharding,),
    )


def on_mesh(prices: MeshPrices, start: int, end: int, submesh: Submesh) -> OnMesh:
    """Return the fastest option of a stage on a mesh with one micro-batch in flight."""
    return prices.fastest(Stage(start, end, submesh), 1)


def plan_meshes(*arguments: Any, **options: Any) -> Plan:
    """Return the best plan of stages on meshes for a task, as `mesh_task` makes it."""
    return plan_on_meshes(mesh_task(*arguments, **options))


def plan_on_meshes(task: MeshTask) -> Plan:
    """Return the plan of stages on meshes whose step is fastest."""
    return choose_on_meshes(task).plan
