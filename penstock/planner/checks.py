"""Check single arguments of plans."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from operator import index
from typing import Any

from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.errors import ConfigError, PartitionError, check_count, check_kind
from penstock.types import LONGEST_TIMEOUT_S


def check_timeout(timeout_s: Any) -> float:
    """Return `timeout_s`; raise a ConfigError unless it is above 0, and at most a year."""
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if not is_number or not math.isfinite(timeout_s) or not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise ConfigError(
            f"timeout_s={timeout_s!r}; it must be a number of seconds above 0 and at most "
            f"{LONGEST_TIMEOUT_S:,.0f} (a year). A host or a process that is lost is noticed "
            "within seconds, however long a wait may last"
        )
    return float(timeout_s)


def check_costs(profile: object, cluster: object) -> None:
    """Raise a ConfigError unless these are a profile and a cluster."""
    remedy = "what penstock.profile(layers, example_inputs) returns, or Profile.load(path)"
    check_kind("profile", profile, Profile, remedy)
    check_cluster(cluster)


def check_cluster(cluster: object) -> None:
    """Raise a ConfigError unless this is a cluster."""
    name = repr(cluster) if isinstance(cluster, str) else "path_or_preset"
    check_kind("cluster", cluster, Cluster, f"a cluster, such as penstock.Cluster.load({name})")


def check_partition(partition: tuple[int, ...], num_layers: int) -> None:
    """Raise a PartitionError unless each stage has a layer, and all together `num_layers`."""
    if not partition or any(type(count) is not int or count < 1 for count in partition):
        raise PartitionError(
            f"partition={list(partition)}: every stage needs at least one layer, counted by an "
            "int; leave a stage without layers out"
        )
    if sum(partition) != num_layers:
        raise PartitionError(
            f"partition={list(partition)} holds {sum(partition)} layers, the model has "
            f"{num_layers}; the counts must sum to {num_layers}"
        )


def check_predicted(
    of_stages_s: Sequence[float] | None, step_s: float | None, batch_size: int | None
) -> None:
    """Raise a ConfigError for seconds below 0 or a batch size below 1; None was not predicted."""
    for name, seconds in (
        ("predicted_s", of_stages_s or ()),
        ("predicted_step_s", (step_s or 0,)),
    ):
        for value in seconds:
            if not value >= 0:  # also refuses NaN
                raise ConfigError(f"{name} of a plan has {value!r}; seconds are at least 0")
    if batch_size is not None:
        check_count("batch_size", batch_size)


def check_whole(name: str, value: Any) -> int:
    """Return a whole number, such as numpy's, as an int; raise a ConfigError for other values."""
    try:
        return int(index(value))
    except TypeError:
        raise ConfigError(f"{name}={value!r}; it must be a whole number") from None


def check_bytes(num_ranks: int, by_name: Mapping[str, Sequence[int] | None]) -> None:
    """Raise a ConfigError unless bytes are None, or a whole number of at least 0 a rank."""
    for name, of_ranks in by_name.items():
        if of_ranks is not None and len(of_ranks) != num_ranks:
            raise ConfigError(
                f"{name} has {len(of_ranks)} entries, and the pipeline {num_ranks} ranks; give "
                "one number for each rank, or one for all"
            )
        for number in of_ranks or ():
            if type(number) is not int or number < 0:
                raise ConfigError(f"{name}={number!r}; it must be a whole number of at least 0")
