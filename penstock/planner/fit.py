"""Choose what the stages of a cut compute twice, so that what each rank keeps fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.types import Recompute, RecomputeLayers, RecomputePolicy

from .price import StagePrices, only, runs_of
from .stage_work import Kinds, held_by_rank, kinds_of


@dataclass(frozen=True, slots=True)
class Policy:
    """The recompute policy of each stage, and whether it offloads its activation memory."""

    recompute: tuple[RecomputePolicy, ...]
    offload: tuple[bool, ...]

    def changed(
        self, stage: int, recompute: RecomputePolicy, *, offload: bool = False
    ) -> "Policy":
        """Return the same with something else for one stage."""
        kinds, moves = list(self.recompute), list(self.offload)
        kinds[stage], moves[stage] = recompute, offload
        return Policy(tuple(kinds), tuple(moves))


@dataclass(frozen=True, slots=True)
class Fitted:
    """The policy for a cut by which each rank keeps no more than it may, and what that is."""

    policy: Policy
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A rank on which a cut does not fit: the least that it could keep, what it may, and how much
    of that is gone for weights before any activation is kept.
    """

    rank: int
    least_bytes: float
    limit_bytes: float
    weight_bytes: float


def fit(prices: StagePrices, partition: Sequence[int]) -> Fitted | NoRoom:
    """Return the first policy by which each rank keeps no more than it may, those that cost
    less before others.

        nothing ─► the layers that free most bytes for a second of work, one by one
                ─► whole stages ─► and what is left of them moved away, where that is allowed

    Ranks do not touch each other's.
    """
    nothing = (False,) * prices.num_stages
    decided = prices.recompute or (Recompute.NEVER,) * prices.num_stages
    moves = tuple(n in prices.may_offload for n in range(prices.num_stages))
    chosen = Policy(decided, nothing if prices.recompute is None else moves)
    runs, peaks = runs_of(partition), []
    for rank, stages in enumerate(prices.stages_of_ranks):
        if not stages:
            peaks.append(0)
            continue
        limit = prices.devices[prices.kinds[stages[0]]].memory_bytes
        weights = sum(float(prices.used_bytes(stage, only(runs[stage]))[0, 0]) for stage in stages)
        tried = []
        for policy in _policies(prices, stages, runs, chosen) if weights <= limit else ():
            tried.append(weights + _peak_bytes(prices, stages, runs, policy))
            if tried[-1] <= limit:
                chosen = policy
                break
        else:
            return NoRoom(rank, min(tried, default=weights), limit, weights)
        peaks.append(round(tried[-1]))
    return Fitted(chosen, tuple(peaks))


def predicted_s(
    prices: StagePrices, partition: Sequence[int], policy: Policy
) -> tuple[float, ...]:
    """Return the seconds of a micro-batch on each stage, forward and backward, without
    messages.
    """
    work = prices.work_if(_kinds(policy))
    found = []
    for stage, run in enumerate(runs_of(partition)):
        device = prices.devices[prices.kinds[stage]]
        seconds = sum(work[stage].seconds(device.seconds, policy.recompute[stage], run))
        if policy.offload[stage]:
            kept = prices.of_stages.kept(run, policy.recompute[stage])
            seconds += 2 * kept.inputs / device.host_bytes_per_s
        found.append(seconds)
    return tuple(found)


def _kinds(policy: Policy) -> Kinds:
    return kinds_of(policy.recompute, (n for n, moves in enumerate(policy.offload) if moves))


def _policies(
    prices: StagePrices, stages: Sequence[int], runs: Sequence[tuple[int, int]], policy: Policy
) -> Iterator[Policy]:
    """Yield policies that keep less and less on the stages of a rank, those that cost less
    first.
    """
    yield policy
    if prices.recompute is not None:
        return
    device = prices.devices[prices.kinds[stages[0]]]

    def gain(pair: tuple[int, int]) -> float:
        again_s = device.seconds[pair[1]].recompute_s
        freed = prices.of_stages.freed_bytes(pair[1])
        return freed / again_s if again_s > 0 else float(freed)

    pairs = [(stage, layer) for stage in stages for layer in range(*runs[stage])]
    pairs = [pair for pair in pairs if prices.of_stages.inner_bytes[pair[1]]]
    for stage, layer in sorted(pairs, key=gain, reverse=True):
        before = policy.recompute[stage]
        known = before.layers if isinstance(before, RecomputeLayers) else ()
        again = RecomputeLayers((*known, layer))
        is_whole = len(again.layers) == runs[stage][1] - runs[stage][0]
        policy = policy.changed(stage, Recompute.STAGE if is_whole else again)
        yield policy
    for stage in stages:
        policy = policy.changed(stage, Recompute.STAGE)
        yield policy
    for stage in stages:
        if stage in prices.may_offload:
            policy = policy.changed(stage, Recompute.STAGE, offload=True)
            yield policy


def _peak_bytes(
    prices: StagePrices, stages: Sequence[int], runs: Sequence[tuple[int, int]], policy: Policy
) -> int:
    """Return the most that a rank keeps at one time by a policy, of all its stages."""
    kinds = Kinds(*(each.intersection(stages) for each in _kinds(policy)))
    size = prices.num_stages, prices.num_microbatches
    held = held_by_rank(prices.family, size, tuple(stages), kinds)
    work = prices.work_if(kinds_of((), ()))  # which parts a backward has
    kept = [
        prices.of_stages.kept(runs[n], policy.recompute[n], divides=work[n].halves > 0)
        for n in stages
    ]
    sizes = [(x.graph, x.inputs, x.weights, x.stays) for x in kept]
    return max(
        (
            sum(
                n * size
                for own, of_stage in zip(time, sizes, strict=True)
                for n, size in zip(own, of_stage, strict=True)
            )
            for time in held
        ),
        default=0,
    )
