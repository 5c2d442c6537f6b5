"""`penstock.plan` and `penstock.simulate`: plan a model for a cluster, or predict its step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.errors import ConfigError, check_kind, shown
from penstock.planner.candidates import Constraints
from penstock.planner.checks import check_cluster, check_costs
from penstock.planner.make_plan import Choice, plan_profile
from penstock.planner.mesh_candidates import OnMeshes
from penstock.planner.mesh_plans import on_layout
from penstock.planner.parallelism import Parallelism
from penstock.planner.plan import Plan
from penstock.planner.predict import Prediction
from penstock.trace.timeline import Timeline

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
    parallelism: Parallelism | None = None,
) -> Plan:
    """Choose the plan of a model on a cluster that fits and has the shortest predicted step.

    See GPipe, section 2.2, and Alpa, sections 4 and 5.

        plan = penstock.plan(penstock.profile(layers, inputs), cluster, batch_size=1024)
        plan = penstock.plan(model, cluster, example_inputs=batch, loss=loss)
        print(plan)
        pipe = penstock.Pipeline(layers, plan=plan, loss=loss)

    It decides stages, replicas, micro-batches, the schedule (of all synchronous families), the
    layers of each stage, and recompute and offload if memory is short.  A stage may have several
    devices, which divide its operators.  The unsplit model is always among the candidates.  The
    same input gives the same plan.

    Args:
        model: a profile from `penstock.profile`, or several of one model, each with another
            number of threads per rank; or a model, as `Pipeline` takes it, or a `Target`, which is
            profiled first.  A profile from a file has no operators: each stage has one device.
        cluster: the devices; ranks are put on them in order.
        batch_size: the samples of a step, over all replicas; default: those of the inputs.
        example_inputs: a batch of the model, unless it is a profile.
        targets: its targets, for the loss.
        loss: (output, target) -> scalar tensor, to be part of the profile.
        constraints: decisions already made; its `batch_size` is replaced.
        sharding: the ready plan by which the devices of a stage share it; "auto": whatever is
            fastest, or none; None: each stage has one device.
        num_layers: into how many the model's layers are clustered before stages are cut at their
            ends (Alpa's L); default: all stay, or 128 where there are more.
        measure: True: the layers are timed here first; False: their operators are counted.
            Default: True for a cluster of cores, which a roofline predicts badly.
        parallelism: a layout to take as it is: nothing is chosen, and other choices do not count.

    Raises:
        PlanError, ConfigError: the profiles are of different models, or do not fit the cluster;
            an argument is missing; nothing fits the memory: says by how much, and what would help.
    """
    # 1. Take a layout as it is.
    given = example_inputs, targets, loss
    if parallelism is not None:
        return layout_of(model, cluster, parallelism, batch_size, given).plan
    # 2. Wrap a model as a target; layers that are measured are checked first.
    if not is_profile(model):
        target = as_target(model, *given)
        if target is not model and (measure or (measure is None and on_cores(cluster))):
            from .parallelize import check_measurable

            layers = target.resolved()
            check_measurable(layers, example_inputs, cluster)  # a user's model is not moved
            target = replace(target, make_model=lambda: layers)
        model = target
    # 3. Choose.
    options: dict[str, Any] = {"constraints": constraints, "num_layers": num_layers}
    return choose(model, cluster, batch_size, measure=measure, sharding=sharding, **options).plan


def choose(  # noqa: PLR0913 - as `plan`
    model: "Profile | Sequence[Profile] | Target",
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
    """Return the choice of `plan`, with all candidates.

    `sizes` are the micro-batches for which a target is profiled, `threads` the numbers of intra-op
    threads of a rank, `options` more arguments of `plan_profile`.
    """
    profiles: Any = model
    # 1. Profile a target, with its own defaults.
    if not is_profile(model):
        target = cast("Target", model)
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
    # 2. Plan by the profiles.
    if batch_size is None:
        raise ConfigError("a profile does not say how large batches are; give batch_size")
    options |= {"constraints": constraints, "sharding": sharding}
    return plan_profile(profiles, cluster, batch_size, **options)


def layout_of(
    model: "Profile | Any",
    cluster: Cluster,
    how: Parallelism,
    batch_size: int | None = None,
    given: tuple[Any, Any, Any] = (None, None, None),
) -> OnMeshes:
    """Return a model's layout with its predicted step; `given` are inputs, targets and loss."""
    profile = model
    if not is_profile(model):
        size = how.rows(cluster) * how.microbatch_size
        (profile,) = as_target(model, *given).profiles_for(cluster, (size,), measure=False)
    return on_layout(how, profile, cluster, batch_size)


def as_target(model: Any, example_inputs: Any, targets: Any, loss: Any) -> "Target":
    """Return a model that a user gave as a target; a ConfigError if it lacks a batch."""
    from .target import Target

    if isinstance(model, Target):
        return model
    if example_inputs is None:
        raise ConfigError(
            f"model={shown(model)} without example_inputs=; give a batch that the model "
            "is called with, or a profile in the place of the model: what "
            "penstock.profile(layers, example_inputs) returns, or Profile.load(path)"
        )
    return Target.of(model, example_inputs, targets, loss)


def on_cores(cluster: Cluster) -> bool:
    """Tell whether all devices of a cluster are cores of CPUs."""
    return all(device.torch_type == "cpu" for device in cluster.devices.values())


def is_profile(model: object) -> bool:
    if isinstance(model, list | tuple):
        return bool(model) and all(isinstance(entry, Profile) for entry in model)
    return isinstance(model, Profile)


def simulate(  # noqa: PLR0913 - the front door: each a keyword with a default
    model: "Profile | Any",
    cluster: Cluster,
    how: Plan | Parallelism,
    *,
    batch_size: int | None = None,
    example_inputs: Any = None,
    targets: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
) -> Timeline:
    """Predict one training step: when each instruction runs, and what memory holds.

        penstock.simulate(profile, cluster, plan)
        penstock.simulate(model, cluster, penstock.Parallelism(tensor=4, pipeline=12, data=5),
                          example_inputs=batch, batch_size=1536)

    The model may be on the meta device, and the cluster one that nobody has.  Rank r of a plan
    runs on device r of the cluster; on a host whose ranks share cores (`busy_speed`), ranks beyond
    its devices begin with the first again.  A rank of the timeline stands for all devices of a
    stage.  The timeline ends before the optimizer.

    Args:
        model: a profile from `penstock.profile`; for a layout also a model, as `penstock.plan`
            takes it, whose layers are counted.
        cluster: the devices.
        how: a plan, which may also come before the profile, or a layout by its usual words.
        batch_size: samples of a step over all replicas; default: those of the plan, or as many as
            the layout's micro-batches have.
        example_inputs: as `penstock.plan` takes them.
        targets: the same.
        loss: the same.

    Raises:
        PlanError: the plan is of another model than the profile; names the first layer.
        ConfigError: the cluster has too few devices, or the batch does not fit the plan; a layout
            does not divide the heads, layers, batch or devices.
    """
    if isinstance(model, Plan):
        model, cluster, how = cast(Any, cluster), cast(Any, how), cast(Any, model)
    if not isinstance(how, Parallelism):
        check_kind("plan", how, Plan, "a plan, such as penstock.Plan.load(path)")
        check_costs(model, cluster)
        return Prediction(how, model, cluster, batch_size).timeline
    check_cluster(cluster)
    given = (example_inputs, targets, loss)
    return layout_of(model, cluster, how, batch_size, given).timeline
