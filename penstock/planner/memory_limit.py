"""Choose what each stage computes twice, so that what its rank keeps fits a limit of bytes.

    nothing ─► the layers that free most bytes for a second of work, one by one ─► the whole stage
            ─► and what is left of it moved away, where that is allowed

The first choice that fits is taken; ranks do not touch each other's.  Versions of the weights that
an asynchronous schedule keeps beside the newest are there whatever is chosen.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from penstock.costs.layer_facts import LayerBytes
from penstock.errors import ConfigError
from penstock.schedules.costs import UNIT_COSTS
from penstock.schedules.ir import Schedule
from penstock.schedules.memory import Sizes, live_bytes
from penstock.schedules.names import families_for
from penstock.schedules.passes import add_offload, add_recompute
from penstock.schedules.versions import num_versions, version_bytes
from penstock.types import Recompute, RecomputeLayers, RecomputePolicy

from .plan import Plan
from .stage_work import steady


@dataclass(frozen=True, slots=True)
class Policy:
    """What is done on each stage: which layers run twice, and what is moved away."""

    recompute: tuple[RecomputePolicy, ...]
    offload: tuple[bool, ...]


def fitted(
    plan: Plan,
    of_layers: Sequence[LayerBytes],
    forward_s: Sequence[float],
    trainable_bytes: Sequence[int],
) -> Plan:
    """Return the plan with the first policy that fits its limit, and the peak of each rank.

    `of_layers` and `forward_s` are those of each layer, for one micro-batch; `trainable_bytes`
    those of the weights that an update moves, each weight in one layer.  Where the plan offloads
    a stage, it may; the result does where it has to.

    Raises:
        ConfigError: nothing fits; says by how many bytes, on which rank, and what would help.
    """
    try:
        return _fitted(plan, of_layers, forward_s, trainable_bytes)
    except _NoRoom as error:
        others = _that_fit(plan, of_layers, forward_s)
        remedy = f", or a schedule that fits: {' or '.join(others)}" if others else ""
        raise ConfigError(f"{error}{remedy}") from None


class _NoRoom(ConfigError):
    """Activations do not fit."""


def _that_fit(
    plan: Plan, of_layers: Sequence[LayerBytes], forward_s: Sequence[float]
) -> list[str]:
    """Name the synchronous schedules that fit the limit with each stage on the rank it is on; none
    for one that updates weights while it runs, which computes something else.
    """
    if plan.schedule.is_asynchronous:
        return []
    per_rank, found = plan.schedule.stages_per_rank, []
    for family in families_for(UNIT_COSTS, per_rank):
        is_twin = per_rank == 1 and dict(family.arguments).get("stages_per_rank") == 1
        if is_twin or family.ranks(plan.num_stages) != plan.placement.places:
            continue
        with suppress(_NoRoom):
            _fitted(replace(plan, schedule=family), of_layers, forward_s, [0] * len(of_layers))
            found.append(family.name)
    return found


def _fitted(
    plan: Plan,
    of_layers: Sequence[LayerBytes],
    forward_s: Sequence[float],
    trainable_bytes: Sequence[int],
) -> Plan:
    assert plan.memory_limit_bytes is not None
    schedule = steady(plan.schedule, plan.num_stages, plan.num_microbatches)
    weights = tuple(sum(trainable_bytes[a:b]) for a, b in _bounds(plan.partition))
    older = version_bytes(schedule, weights)
    nothing = Policy((Recompute.NEVER,) * plan.num_stages, (False,) * plan.num_stages)
    chosen, peaks = nothing, []
    for rank, limit in enumerate(plan.memory_limit_bytes):
        of_versions = sum(older[stage] for stage in _stages_of(plan, rank))
        if of_versions > limit:
            raise _no_room_for_versions(plan, rank, num_versions(schedule), weights)
        tried = []
        for policy in _policies(plan, rank, chosen, of_layers, forward_s):
            tried.append(of_versions + peak_of(rank, schedule, plan, policy, of_layers))
            if tried[-1] <= limit:
                chosen = policy
                break
        else:
            raise _no_room(plan, rank, min(tried), of_versions)
        peaks.append(tried[-1])
    return replace(
        plan,
        recompute=chosen.recompute,
        offload=chosen.offload,
        predicted_peak_bytes=tuple(peaks),
    )


def peak_of(
    rank: int, schedule: Schedule, plan: Plan, policy: Policy, of_layers: Sequence[LayerBytes]
) -> int:
    """Return the most that a rank keeps under a policy."""
    twice = [s for s, kind in enumerate(policy.recompute) if kind is not Recompute.NEVER]
    away = [s for s, moves in enumerate(policy.offload) if moves]
    only = Schedule((schedule.programs[rank],))
    program = add_offload(add_recompute(only, twice), away).programs[0]
    sizes = sizes_of(plan.partition, policy.recompute, of_layers)
    return max(live_bytes(program, sizes.of_stages(plan.num_stages)), default=0)


def sizes_of(
    partition: Sequence[int], recompute: Sequence[RecomputePolicy], of_layers: Sequence[LayerBytes]
) -> Sizes:
    """Return what each stage keeps of a micro-batch, before and after its recompute, and
    between the parts of a backward.
    """
    bounds = _bounds(partition)
    kept, inputs, left = [], [], []
    for (start, end), kind in zip(bounds, recompute, strict=True):
        own, is_last = of_layers[start:end], end == len(of_layers)
        kept.append(_kept(own, frozenset(), is_last=is_last))
        left.append(sum(layer.left for layer in own))
        if isinstance(kind, RecomputeLayers):
            dropped = frozenset(n - start for n in kind.layers if isinstance(n, int))
            inputs.append(_kept(own, dropped, is_last=is_last))
        else:
            inputs.append(own[0].inputs)
    stays = (of_layers[0].inputs, *(0 for _ in bounds[1:]))
    return Sizes(
        kept_bytes=tuple(kept),
        input_bytes=tuple(inputs),
        weight_bytes=tuple(left),
        stay_bytes=stays,
    )


def _kept(own: Sequence[LayerBytes], dropped: frozenset[int], *, is_last: bool) -> int:
    """Add up what a stage's layers keep, each value once, where some drop all but their inputs."""
    total = own[0].inputs
    for n, layer in enumerate(own):
        total += 0 if n in dropped else layer.inner
        if n + 1 == len(own):
            total += 0 if n in dropped else layer.saved_results
            continue
        after = own[n + 1]
        of_result = 0 if n in dropped else layer.saved_results
        of_input = after.inputs if n + 1 in dropped else after.saved_inputs
        total += max(of_result, of_input)
    return total + (own[-1].results if is_last else 0)  # the loss saves about as much


def _policies(
    plan: Plan,
    rank: int,
    policy: Policy,
    of_layers: Sequence[LayerBytes],
    forward_s: Sequence[float],
) -> Iterator[Policy]:
    """Yield policies that keep less and less on the stages of a rank, those that cost less
    first.
    """
    yield policy
    bounds, mine = _bounds(plan.partition), _stages_of(plan, rank)

    def gain(pair: tuple[int, int]) -> float:
        layer = of_layers[pair[1]]
        freed = layer.inner + layer.saved_results
        return freed / forward_s[pair[1]] if forward_s[pair[1]] > 0 else float(freed)

    pairs = [(stage, layer) for stage in mine for layer in range(*bounds[stage])]
    pairs = [(s, layer) for s, layer in pairs if of_layers[layer].inner]
    for stage, layer in sorted(pairs, key=gain, reverse=True):
        before = policy.recompute[stage]
        known = before.layers if isinstance(before, RecomputeLayers) else ()
        policy = _with(policy, stage, RecomputeLayers((*known, layer)))
        yield policy
    for stage in mine:
        policy = _with(policy, stage, Recompute.STAGE)
        yield policy
    for stage in mine:
        if plan.offload[stage]:
            policy = _with(policy, stage, Recompute.STAGE, offload=True)
            yield policy


def _with(policy: Policy, stage: int, kind: RecomputePolicy, *, offload: bool = False) -> Policy:
    recompute, moves = list(policy.recompute), list(policy.offload)
    recompute[stage], moves[stage] = kind, offload
    return Policy(tuple(recompute), tuple(moves))


def _bounds(partition: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(partition, initial=0)))


def _stages_of(plan: Plan, rank: int) -> list[int]:
    return [stage for stage, place in enumerate(plan.placement.places) if place == rank]


def _no_room(plan: Plan, rank: int, least: int, of_versions: int) -> _NoRoom:
    assert plan.memory_limit_bytes is not None
    limit = plan.memory_limit_bytes[rank]
    stages = _stages_of(plan, rank)
    names = ", ".join(map(str, stages))
    may_move = all(plan.offload[stage] for stage in stages)
    versions = f" and {of_versions:,} in older versions of weights" if of_versions else ""
    return _NoRoom(
        f"memory_limit_bytes={limit:,} on rank {rank} (stage {names}): {least - limit:,} bytes "
        f"too few; with whole stages computed twice{' and moved away' if may_move else ''} it "
        f"still keeps {least - of_versions:,} of {plan.num_microbatches} micro-batches{versions}. "
        f"Give {'' if may_move else 'offload=True, '}more and smaller micro-batches, more stages"
    )


def _no_room_for_versions(
    plan: Plan, rank: int, versions: Sequence[int], weights: Sequence[int]
) -> ConfigError:
    assert plan.memory_limit_bytes is not None
    limit, stages = plan.memory_limit_bytes[rank], _stages_of(plan, rank)
    needed = sum((versions[stage] - 1) * weights[stage] for stage in stages)
    kept = [f"{versions[s]} versions of {weights[s]:,} bytes on stage {s}" for s in stages]
    return ConfigError(
        f"memory_limit_bytes={limit:,} on rank {rank}: {needed - limit:,} bytes too few for "
        f"weights alone; {plan.schedule!r} keeps {', '.join(kept)}, and all but the newest count. "
        "Use more and smaller stages, or a schedule with fewer versions (pipedream_2bw has two, "
        "one_f_one_b one)"
    )
