"""Cut a chain of layers into balanced stages: exact, by dynamic programming."""

from collections.abc import Callable, Sequence
from itertools import accumulate, islice

from penstock.errors import PartitionError


def balance_spans(
    costs: Sequence[Sequence[float]], spans: Sequence[tuple[int, int]]
) -> tuple[int, ...]:
    """Compute the layers per stage as `balance_stages` does, where stages begin at spans only.

    `spans` are (start, end) of layers that are to be on one stage, in order, all layers in one.
    """
    of_spans = [[sum(on_stage[start:end]) for start, end in spans] for on_stage in costs]
    counts = iter(balance_stages(of_spans))
    widths = iter(end - start for start, end in spans)
    return tuple(sum(islice(widths, count)) for count in counts)


def balance(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Compute the layers per stage where a layer costs the same on every stage.

        balance([1, 1, 1, 3, 3], 3) == (3, 1, 1)

    Raises:
        PartitionError: there are fewer layers than stages, or no stage is asked for.
    """
    _check_enough(len(costs), num_stages)
    return balance_stages([costs] * num_stages)


def balance_stages(costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Compute the layers per stage that make the slowest stage as fast as it can be.

    `costs[k][n]` is the cost of layer n on stage k.  Among the partitions with the same slowest
    stage, takes the one whose stage costs vary least (the paper's criterion, section 2.2).
    Exact; O(K * L^2) for L layers.  Every stage gets a layer.

    Raises:
        PartitionError: there are fewer layers than stages.
    """
    num_stages, num_layers = len(costs), len(costs[0])
    _check_enough(num_layers, num_stages)
    before = [[0.0, *accumulate(on_stage)] for on_stage in costs]

    def cost(stage: int, start: int, end: int) -> float:
        return before[stage][end] - before[stage][start]

    slowest = _slowest_stage(num_layers, num_stages, cost)
    bound = slowest * (1 + 1e-12)
    # least[end] = (sum of squared stage costs, layers per stage) of the best cut of layers [0,
    # end)
    least: list[tuple[float, tuple[int, ...]] | None] = [(0.0, ())] + [None] * num_layers
    for stage in range(num_stages):
        following: list[tuple[float, tuple[int, ...]] | None] = [None] * (num_layers + 1)
        for end in range(1, num_layers + 1):
            choices = [
                (found[0] + here**2, (*found[1], end - start))
                for start in range(end)
                if (found := least[start]) is not None
                and (here := cost(stage, start, end)) <= bound
            ]
            following[end] = min(choices, default=None)
        least = following
    best = least[num_layers]
    assert best is not None, "the bound came from a partition"
    return best[1]


def _check_enough(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise PartitionError(
            f"num_stages={num_stages}, but the model has {num_layers} layers; choose 1 to "
            f"{num_layers} stages, or give the model as more, smaller layers"
        )


def _slowest_stage(
    num_layers: int, num_stages: int, cost: Callable[[int, int, int], float]
) -> float:
    """Compute the least possible cost of the slowest stage."""
    slowest = [0.0] + [float("inf")] * num_layers
    for stage in range(num_stages):
        slowest = [float("inf")] + [
            min(max(slowest[start], cost(stage, start, end)) for start in range(end))
            for end in range(1, num_layers + 1)
        ]
    return slowest[num_layers]
