"""`penstock.plan`: plan a model, or what it costs, for a cluster."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.errors import ConfigError, shown
from penstock.planner.candidates import Constraints
from penstock.planner.make_plan import Choice, plan_profile
from penstock.planner.plan import Plan

if TYPE_CHECKING:
    from .target import Target


def plan(  # noqa: PLR0913 - the front door: each a keyword with a default
    model: "Profile | Sequence[Profile] | Target | Any",
    cluster: Cluster,
    batch_size: int | None = None,
    *,
    example_inputs: Any = None,
    targets: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    constraints: Constraints | None = None,
    sharding: str | None = "auto",
    num_layers: int | None = None,
    measure: bool | None = None,
) -> Plan:
    """Choose how to run a model on a cluster: the plan whose step is predicted to take least time,
    and that fits (GPipe, section 2.2; Alpa, sections 4 and 5).

        plan = penstock.plan(penstock.profile(layers, inputs), cluster, batch_size=1024)
        plan = penstock.plan(model, cluster, example_inputs=batch, loss=loss)
        print(plan)
        pipe = penstock.Pipeline(layers, plan=plan, loss=loss)

    It decides on stages, replicas, micro-batches, the schedule (each synchronous family), the
    layers of each stage, and on what is recomputed or moved away where memory asks for it.  Stages
    may have several devices each, of unlike numbers, that divide its operators.  The uncut model
    is always among the candidates.  The same input gives the same plan.

    Args:
        model: what the layers cost, from `penstock.profile`; or several such of one model, each
            measured with another number of threads for a rank.  A profile that was read from a
            file does not know the operators: each stage then has one device.  Or a model, as
            `Pipeline` takes it, or a `Target`, which is profiled first.
        cluster: the devices; ranks are put on them in order.
        batch_size: the samples of a step, over all replicas; default: those of the inputs.
        example_inputs: a batch of the model, where that is no profile.
        targets: its targets, for the loss.
        loss: (output, target) -> scalar tensor, to be part of the profile.
        constraints: what is decided already; its `batch_size` is replaced.
        sharding: the ready plan by which the devices of a stage share it; "auto": whatever is
            fastest, or none; None: each stage has one device.
        num_layers: into how many the model's layers are clustered before stages are cut at their
            ends (Alpa's L); default: all stay, or 128 where there are more.
        measure: whether the layers of a model are run first, here, and take times; default: on
            cores, which a roofline knows little of, they are; for accelerators they are counted.

    Raises:
        PlanError, ConfigError: the profiles are of different models, or do not fit the cluster;
            an argument is missing; nothing fits the memory: says by how much, and what would help.
    """
    if not is_profile(model):
        from .target import Target

        if not isinstance(model, Target):
            if example_inputs is None:
                raise ConfigError(
                    f"model={shown(model)} without example_inputs=; give a batch that the model "
                    "is called with, or a profile in the place of the model: what "
                    "penstock.profile(layers, example_inputs) returns, or Profile.load(path)"
                )
            target = Target.of(model, example_inputs, targets, loss)
            if measure or (measure is None and on_cores(cluster)):
                from .parallelize import check_measurable

                layers = target.resolved()
                check_measurable(layers, example_inputs, cluster)  # a user's model is not moved
                target = replace(target, make_model=lambda: layers)
            model = target
    options: dict[str, Any] = {"constraints": constraints, "num_layers": num_layers}
    return choose(model, cluster, batch_size, measure=measure, sharding=sharding, **options).plan


def choose(  # noqa: PLR0913 - as `plan`
    given: "Profile | Sequence[Profile] | Target",
    cluster: Cluster,
    batch_size: int | None = None,
    *,
    sizes: Sequence[int] = (),
    threads: Sequence[int] = (),
    measure: bool | None = None,
    sharding: str | Sequence[str] | None = "auto",
    constraints: Constraints | None = None,
    **options: Any,
) -> Choice:
    """Return the plan that `plan` does, with the candidates that it was compared with.

    `sizes` are the micro-batches for which the layers of a target are profiled, `threads` the
    numbers of intra-op threads of a rank, `options` those of `plan_profile`.
    """
    profiles: Any = given
    if not is_profile(given):
        target = cast("Target", given)
        batch_size = batch_size or target.batch_size
        constraints = constraints or Constraints(batch_size=batch_size)
        if constraints.num_microbatches is None:
            constraints = replace(constraints, num_microbatches=target.fixed_microbatches)
        sharding = target.shardings if sharding == "auto" else sharding
        if measure is None and on_cores(cluster):
            measure = True
        if not sizes and constraints.num_microbatches is not None:
            parts = (constraints.num_microbatches << n for n in range(len(cluster.places)))
            sizes = sorted({-(-batch_size // n) for n in parts if n <= batch_size})
        profiles = target.profiles_for(cluster, sizes, measure=measure, threads=threads)
    if batch_size is None:
        raise ConfigError("a profile does not say how large batches are; give batch_size")
    options |= {"constraints": constraints, "sharding": sharding}
    return plan_profile(profiles, cluster, batch_size, **options)


def on_cores(cluster: Cluster) -> bool:
    """Tell whether all devices of a cluster are cores of CPUs."""
    return all(device.torch_type == "cpu" for device in cluster.devices.values())


def is_profile(model: object) -> bool:
    """Tell whether this is a profile, or several."""
    if isinstance(model, list | tuple):
        return bool(model) and all(isinstance(each, Profile) for each in model)
    return isinstance(model, Profile)
