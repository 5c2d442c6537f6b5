"""How the paper's models were cut, as far as its code tells, and what else they may have been."""

from collections.abc import Callable

from penstock import Cluster, Profile
from penstock.interval import likely
from penstock.planner.partition import balance, lingvo_cut
from penstock.planner.pricing import Pricing

from .models import forward_flops

Cut = Callable[[Profile, int, Cluster, int], tuple[int, ...]]
"""(profile, number of stages, cluster, micro-batch size) -> layers of each stage."""


def as_many_blocks(profile: Profile, num_stages: int, *_: object) -> tuple[int, ...]:
    """Give each stage as many blocks; the embedding comes with the first, the head with the last.

    What `splits` of layers_with_gpipe.py in tensorflow/lingvo does with a number.
    """
    num_blocks = sum(layer.name.startswith("block") for layer in profile.layers)
    each = -(-num_blocks // num_stages)
    ends = [min(num_blocks, each * (stage + 1)) for stage in range(num_stages)]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    sizes[0] += 1
    sizes[-1] += len(profile.layers) - num_blocks - 1
    return tuple(sizes)


def by_flops(profile: Profile, num_stages: int, *_: object) -> tuple[int, ...]:
    """Cut as lingvo does, by the FLOPs of each layer's forward; stages left empty are left out."""
    sizes = lingvo_cut(forward_flops(profile), num_stages)
    return tuple(size for size in sizes if size)


def by_least_variance(profile: Profile, num_stages: int, *_: object) -> tuple[int, ...]:
    """Cut as the paper's text says: FLOPs of the stages vary least, the slowest first."""
    return balance(forward_flops(profile), num_stages)


def by_time(
    profile: Profile, num_stages: int, cluster: Cluster, microbatch_size: int
) -> tuple[int, ...]:
    """Cut so that the slowest stage is as fast as it can be."""
    cluster = cluster.resolved(likely)
    seconds = Pricing(profile, cluster).seconds(cluster.places[0].kind, microbatch_size, 2)
    return balance([x.forward_s + x.recompute_s + x.backward_s for x in seconds], num_stages)
