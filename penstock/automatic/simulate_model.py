"""`penstock.simulate`: predict a step of a plan or of a layout."""

from collections.abc import Callable
from typing import Any, cast

from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.planner.checks import check_cluster
from penstock.planner.parallelism import Parallelism
from penstock.planner.plan import Plan
from penstock.planner.predict import simulate as simulate_plan
from penstock.trace.timeline import Timeline

from .plan_model import layout_of


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
        return simulate_plan(how, model, cluster, batch_size=batch_size)
    check_cluster(cluster)
    given = (example_inputs, targets, loss)
    return layout_of(model, cluster, how, batch_size, given).timeline
