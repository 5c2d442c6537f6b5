"""One line: a model and what there is, planned and made into a pipeline (Zheng et al. 2022)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.costs.cluster import Cluster
from penstock.errors import ConfigError, check_count
from penstock.launcher import end_with_launcher
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
from penstock.planner.plan import Plan
from penstock.runtime.profiling import profile
from penstock.types import Transport

from .hosts import measure_cluster, plan_mesh
from .target import sizes_up_to


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
        cluster.check_devices(num_processes())
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
    """Plan a model for a job of a process for each device of a cluster; no device of it is needed,
    but the first one to measure.

    Arguments and errors are those of `parallelize`.  Devices that would not make a step faster
    stay unused.
    """
    layers = resolve_layers(layers, example_inputs)
    count, batch_size = len(cluster.places), samples_of(example_inputs, "example_inputs")
    kind = cluster.device_of(0).torch_type
    costs = profile(
        layers,
        example_inputs,
        microbatch_sizes=sizes_up_to(batch_size),
        measure=measure,
        threads=1,
        torch_type=None if measure else kind,
    )
    asked = Constraints(
        batch_size=batch_size,
        num_microbatches=num_microbatches,
        transport=Transport.TORCH_DISTRIBUTED if count > 1 else None,
    )
    choice = plan_profile(
        costs,
        cluster,
        batch_size,
        constraints=asked,
        sharding=sharding,
        num_layers=num_layers,
    )
    found = choice.plan
    return replace(found, placement=found.placement.among(count)) if count > 1 else found


def check_measurable(layers: Layers, inputs: Any, cluster: Cluster | None) -> None:
    """Refuse to measure what cannot run, or runs on another kind of device than is planned for."""
    modules = (step.module for step in layers)
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    tensors += [leaf for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor)]
    kinds = sorted({tensor.device.type for tensor in tensors})
    wanted = kinds[0] if cluster is None else cluster.device_of(0).torch_type
    if kinds != [wanted] or wanted == "meta":
        raise ConfigError(
            f"measure=True runs the layers where they are, and model and inputs are on "
            f"{' and '.join(kinds)}; give both on {'one device' if cluster is None else wanted}, "
            "or measure=False, by which seconds are estimated"
        )
