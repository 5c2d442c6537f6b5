"""Choose the recompute and offload policy of each stage so that each rank fits its memory."""

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
        kinds, moves = list(self.recompute), list(self.offload)
        kinds[stage], moves[stage] = recompute, offload
        return Policy(tuple(kinds), tuple(moves))


@dataclass(frozen=True, slots=True)
class Fitted:
    """A policy by which all ranks fit, and the peak activation bytes of each."""

    policy: Policy
    peak_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NoRoom:
    """A rank on which a partition does not fit; `weight_bytes` are a part of `least_bytes`."""

    rank: int
    least_bytes: float
    limit_bytes: float
    weight_bytes: float


def fit(prices: StagePrices, partition: Sequence[int]) -> Fitted | NoRoom:
    """Return the first policy, cheapest first, by which each rank fits its memory.

        recompute nothing ─► layers one by one, most freed bytes per second first
                          ─► whole stages ─► layer by layer
                          ─► whole stages, offloaded, where that is allowed

    Each rank is decided on its own: its memory depends on its own stages only.
    """
    # 1. Start from the policy that was decided, or from no recompute.
    nothing = (False,) * prices.num_stages
    recompute = prices.recompute or (Recompute.NEVER,) * prices.num_stages
    moves = tuple(n in prices.may_offload for n in range(prices.num_stages))
    chosen = Policy(recompute, nothing if prices.recompute is None else moves)
    runs, peaks = runs_of(partition), []
    # 2. On each rank, try policies that keep less and less until one fits.
    for rank, stages in enumerate(prices.stages_of_ranks):
        if not stages:
            peaks.append(0)
            continue
        limit = prices.devices[prices.kinds[stages[0]]].memory_bytes
        weights = sum(float(prices.used_bytes(stage, only(runs[stage]))[0, 0]) for stage in stages)
        peaks_tried = []
        for policy in _policies(prices, stages, runs, chosen) if weights <= limit else ():
            peaks_tried.append(weights + _peak_bytes(prices, stages, runs, policy))
            if peaks_tried[-1] <= limit:
                chosen = policy
                break
        else:
            return NoRoom(rank, min(peaks_tried, default=weights), limit, weights)
        peaks.append(round(peaks_tried[-1]))
    return Fitted(chosen, tuple(peaks))


def predicted_s(
    prices: StagePrices, partition: Sequence[int], policy: Policy
) -> tuple[float, ...]:
    """Return the seconds of a micro-batch's forward and backward on each stage."""
    work = prices.work_if(_kinds(policy))
    stages_s = []
    for stage, run in enumerate(runs_of(partition)):
        device = prices.devices[prices.kinds[stage]]
        seconds = sum(work[stage].seconds(device.seconds, policy.recompute[stage], run))
        if policy.offload[stage]:
            kept = prices.of_stages.kept(run, policy.recompute[stage])
            seconds += 2 * kept.inputs / device.host_bytes_per_s
        stages_s.append(seconds)
    return tuple(stages_s)


def _kinds(policy: Policy) -> Kinds:
    return kinds_of(policy.recompute, (n for n, moves in enumerate(policy.offload) if moves))


def _policies(
    prices: StagePrices, stages: Sequence[int], runs: Sequence[tuple[int, int]], policy: Policy
) -> Iterator[Policy]:
    """Yield policies that keep less and less on the stages of a rank, the cheapest first."""
    yield policy
    if prices.recompute is not None:
        return
    device = prices.devices[prices.kinds[stages[0]]]

    def gain(at: tuple[int, int]) -> float:
        again_s = device.seconds[at[1]].recompute_s
        freed = prices.of_stages.freed_bytes(at[1])
        return freed / again_s if again_s > 0 else float(freed)

    # 1. Recompute layers one by one; a stage with all its layers recomputes as a whole.
    layers = [(stage, layer) for stage in stages for layer in range(*runs[stage])]
    layers = [at for at in layers if prices.of_stages.inner_bytes[at[1]]]
    for stage, layer in sorted(layers, key=gain, reverse=True):
        previous = policy.recompute[stage]
        recomputed = previous.layers if isinstance(previous, RecomputeLayers) else ()
        more = RecomputeLayers((*recomputed, layer))
        is_whole = len(more.layers) == runs[stage][1] - runs[stage][0]
        policy = policy.changed(stage, Recompute.STAGE if is_whole else more)
        yield policy
    # 2. Recompute whole stages: each keeps its inputs only, but all of its graph at a backward;
    #    or layer by layer: inputs of all layers, but the graph of one.
    for kind in (Recompute.STAGE, Recompute.LAYERS):
        for stage in stages:
            policy = policy.changed(stage, kind)
            yield policy
    # 3. Recompute whole stages, and offload their inputs.
    for stage in stages:
        if stage in prices.may_offload:
            policy = policy.changed(stage, Recompute.STAGE, offload=True)
            yield policy


def _peak_bytes(
    prices: StagePrices, stages: Sequence[int], runs: Sequence[tuple[int, int]], policy: Policy
) -> int:
    """Return the peak bytes of a rank under a policy, summed over its stages at each time."""
    kinds = Kinds(*(affected.intersection(stages) for affected in _kinds(policy)))
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
                for held_by_stage, of_stage in zip(time, sizes, strict=True)
                for n, size in zip(held_by_stage, of_stage, strict=True)
            )
            for time in held
        ),
        default=0,
    )
