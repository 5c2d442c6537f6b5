"""`penstock.plan`: from a profile and a cluster to the plan that takes least."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.errors import PlanError
from penstock.trace.timeline import Timeline

from .candidates import Constraints
from .checks import check_costs
from .plan import Plan
from .rank import Candidates, find_plans
from .reasons import why_best


def plan(
    profile: Profile | Sequence[Profile],
    cluster: Cluster,
    batch_size: int,
    *,
    constraints: Constraints | None = None,
) -> Plan:
    """Choose how to run a model on a cluster: what is predicted to take the least time, and fits.

        plan = penstock.plan(profile, cluster, batch_size=1024)
        print(plan)
        pipe = penstock.Pipeline(layers, plan=plan, loss=loss)

    Stages, replicas, micro-batches, the schedule (each synchronous family), the layers of each
    stage, and what is recomputed or moved away where memory asks for it.  Not to cut the model is
    always among the candidates.  The same input gives the same plan.

    Args:
        profile: what the layers cost; or several of one model, each measured with another number
            of threads for a rank.
        cluster: what there is; ranks are put on its devices in order.
        batch_size: the samples of a step, over all replicas.
        constraints: what is decided already; its `batch_size` is replaced.

    Raises:
        PlanError, ConfigError: the profiles are of different models, or do not fit the cluster;
            nothing fits the memory: says by how much, and what would help.
    """
    return choose_plan(profile, cluster, batch_size, constraints=constraints)[0]


def choose_plan(
    profile: Profile | Sequence[Profile],
    cluster: Cluster,
    batch_size: int,
    *,
    constraints: Constraints | None = None,
    num_best: int = 5,
) -> tuple[Plan, Candidates]:
    """Return the plan that `plan` does, and the candidates that came next."""
    is_list = isinstance(profile, list | tuple) and profile
    profiles: list[Profile] = [*cast(Sequence[Profile], profile if is_list else [profile])]
    for each in profiles:
        check_costs(each, cluster)
    constraints = replace(constraints or Constraints(batch_size=batch_size), batch_size=batch_size)
    choices = find_plans(profiles, cluster, constraints, num_best=num_best)
    best = choices.best[0]
    chosen = replace(
        best.plan,
        why=why_best(choices, cluster),
        predicted_peak_bytes=tuple(best.predicted.timeline.peak_bytes_of_ranks()),
    )
    return chosen, choices


def save_prediction(path: Path, timeline: Timeline) -> None:
    """Write what was predicted for a plan beside its file.

    Raises:
        PlanError: the file cannot be written.
    """
    beside = prediction_path(path)
    try:
        beside.write_text(timeline.to_json(), encoding="utf-8")
    except OSError as error:
        raise PlanError(f"cannot write {beside}: {error.strerror}") from None


def prediction_path(path: Path) -> Path:
    """Return the file beside a plan's that has its predicted timeline."""
    return path.with_suffix(".predicted.json")
