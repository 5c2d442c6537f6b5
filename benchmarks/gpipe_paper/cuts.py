"""How the paper's models were cut, as far as its code tells, and what else they may have been."""

from collections.abc import Callable, Sequence
from itertools import accumulate

from penstock import Cluster, Profile
from penstock.errors import PartitionError
from penstock.planner.cuts import balance
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
    seconds = Pricing(profile, cluster).seconds(cluster.places[0].kind, microbatch_size, 2)
    return balance([x.forward_s + x.recompute_s + x.backward_s for x in seconds], num_stages)


def lingvo_cut(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Compute the layers per stage as the paper's code does, to compare with.

        lingvo_cut([1, 1, 1, 3, 3], 3) == (2, 1, 2)

    Walks over the layers once; a layer goes where its share of all costs, with those before it,
    ends: stage min(floor(K * share), K - 1).  A layer across a boundary is so on the later stage,
    and a stage may be left empty.  The paper states another aim, the least variance of costs
    (Huang et al. 2019, section 2.2); its costs are FLOPs, estimated.  See
    PartitionSequentialLayers in tensorflow/lingvo, core/gpipe.py.

    Raises:
        PartitionError: no stage is asked for, or layers cost nothing.
    """
    *_, total = accumulate(costs, initial=0.0)
    if num_stages < 1 or total <= 0:
        raise PartitionError(
            f"num_stages={num_stages} of layers that cost {total} together; give at least one "
            "stage, and costs above 0"
        )
    sizes = [0] * num_stages
    for so_far in accumulate(costs):
        sizes[min(int(num_stages * so_far / total), num_stages - 1)] += 1
    return tuple(sizes)
