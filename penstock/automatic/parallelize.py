"""One line: a model and what there is, planned and made into a pipeline (Zheng et al. 2022)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from penstock.costs.cluster import Cluster
from penstock.costs.counting.count import record_graph
from penstock.errors import ConfigError, check_count
from penstock.launcher import end_with_launcher
from penstock.mesh.mesh import DEFAULT_TIMEOUT_S
from penstock.mesh.start import num_processes
from penstock.model.batch import batch_size as samples_of
from penstock.model.capture.capture import resolve_layers
from penstock.model.layer_list import Layer
from penstock.model.layers import Layers
from penstock.pipeline import Pipeline
from penstock.planner.arguments import Model
from penstock.planner.checks import check_timeout
from penstock.planner.plan import Plan
from penstock.runtime.microbatches import first_microbatch
from penstock.runtime.planning import facts_of
from penstock.trace.progress import saying

from .choose import SHARDINGS, MeshTask, plan_on_meshes
from .clusters import MOST_CLUSTERS, clustered
from .hosts import check_devices, measure_cluster, plan_mesh
from .measured import check_measurable, with_measured


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
    measure: bool = False,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: torch.device | str | None = None,
    **options: Any,
) -> Pipeline:
    """Plan how to run a model on what there is, and make the pipeline.

        pipe = penstock.parallelize(model, inputs, loss=loss)     # under torchrun, or alone
        print(pipe.plan)

    Layers are cut into stages, each on some of the devices, and the operators of a stage are
    divided among these: what the simulator finds fastest, that fits.  In a job of processes rank 0
    plans, the others wait however long that takes, and each then runs its part; where more devices
    would not make a step faster, some processes take part without a stage.

    Args:
        model: as `Pipeline` takes it.
        example_inputs: a batch; only shapes and dtypes count.
        batch_size: the samples of a step; default: those of `example_inputs`.
        loss: as `Pipeline` takes it.
        cluster: the devices, in the order of ranks; default: this machine, measured.
        num_microbatches: M, if it is decided already.
        num_layers: into how many the model's layers are clustered before stages are cut at their
            ends (Alpa's L); default: all stay, or 128 where there are more.
        sharding: the ready plan by which operators are divided.
        measure: whether to run the layers first, whole and where they are, and take times (on rank
            0): their operators then take as many times the estimate as the layer did.
        seed: of the layers' random streams.
        timeout_s: deadline of every wait between processes, in seconds.
        device: what this process computes on, as for `init_mesh`.
        options: what else `Pipeline` takes beside a plan.

    Raises:
        ConfigError: the cluster has another number of devices than there are processes; the
            processes were given different arguments; the model has fewer layers than asked for;
            layers are to be measured and have no values, or are not on the kind of the devices.
        PlanError: nothing fits; says what is missing.
    """
    end_with_launcher()
    timeout_s = check_timeout(timeout_s)
    layers = resolve_layers(model, example_inputs)
    found = samples_of(example_inputs, "example_inputs")
    batch_size = found if batch_size is None else check_count("batch_size", batch_size)
    if batch_size != found:
        raise ConfigError(
            f"batch_size={batch_size}, and example_inputs hold {found} samples; give a batch of "
            "as many, on the meta device if it is large"
        )
    if num_layers is not None:
        check_count("num_layers", num_layers)
    if cluster is not None:
        check_devices(cluster, num_processes())
    if measure:
        check_measurable(layers, example_inputs, cluster)
    numbers = {"num_microbatches": num_microbatches, "num_layers": num_layers}
    decided: dict[str, Any] = {**numbers, "sharding": sharding, "measure": measure}

    def make_plan() -> Plan:
        devices = cluster or measure_cluster(num_processes())
        return plan_for(layers, example_inputs, devices, **decided)

    mesh, plan = plan_mesh(
        make_plan,
        cluster=cluster,
        same={"batch_size": batch_size, **decided},
        timeout_s=timeout_s,
        device=device,
    )
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
    measure: bool = False,
) -> Plan:
    """Plan stages on sub-meshes of a cluster, with their sharding; no device of it is needed, but
    the first one to measure.

    Arguments and errors are those of `parallelize`.  Devices that would not make a step faster
    stay unused.
    """
    layers = resolve_layers(layers, example_inputs)
    task = mesh_task(layers, example_inputs, cluster, num_microbatches, sharding, num_layers)
    if measure:
        task = with_measured(task, layers, example_inputs)
    return plan_on_meshes(task)


def mesh_task(
    layers: Any,
    example_inputs: Any,
    cluster: Cluster,
    num_microbatches: int | None = None,
    sharding: str = "auto",
    num_layers: int | None = None,
) -> MeshTask:
    """Return what is to be planned; arguments are those of `parallelize`."""
    resolved = resolve_layers(layers, example_inputs)
    task = MeshTask(
        model=Model(facts_of(resolved), resolved.spans),
        names=[step.path for step in resolved],
        graph_of=cache(
            lambda number: record_graph(resolved, first_microbatch(example_inputs, number))
        ),
        cluster=cluster,
        batch_size=samples_of(example_inputs, "example_inputs"),
        num_microbatches=num_microbatches,
        shardings=SHARDINGS if sharding == "auto" else (sharding,),
    )
    if num_layers is not None:
        check_count("num_layers", num_layers)
    elif len(resolved.spans) > MOST_CLUSTERS:
        num_layers = MOST_CLUSTERS
    if num_layers is None:
        return task
    with saying(f"clustering {len(resolved.spans)} layers into {num_layers}"):
        graph, device = task.graph_of(task.numbers[0]), cluster.device_of(0)
        spans = clustered(graph, resolved.spans, device, num_layers)
    return replace(task, model=replace(task.model, spans=tuple(spans)))
