"""How many versions of each stage's weights a schedule keeps at once."""

from collections import Counter
from collections.abc import Sequence

from .ir import ADDS_GRADIENTS, Forward, Schedule, UpdateWeights


def uses_of_versions(schedule: Schedule) -> dict[int, Counter[int]]:
    """Count, for each stage that updates its weights, the micro-batches that need each version."""
    updated = {x.stage for x in schedule.instructions if isinstance(x, UpdateWeights)}
    uses: dict[int, Counter[int]] = {stage: Counter() for stage in updated}
    for x in schedule.instructions:
        if isinstance(x, Forward) and x.stage in updated:
            uses[x.stage][x.version] += 1
    return uses


def num_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage the most versions of its weights that are there at once: 1 where
    nothing updates them, or nothing needs an old one.
    """
    most = [1] * schedule.num_stages
    for stage, waiting in uses_of_versions(schedule).items():
        newest, version_of = 0, {}
        for x in schedule.programs[schedule.ranks[stage]]:
            if x.stage != stage:
                continue
            if isinstance(x, Forward):
                version_of[x.microbatch] = x.version
            elif isinstance(x, ADDS_GRADIENTS):
                waiting[version_of[x.microbatch]] -= 1
            elif isinstance(x, UpdateWeights):
                newest += 1
                older = sum(1 for version, left in waiting.items() if left and version < newest)
                most[stage] = max(most[stage], 1 + older)
    return tuple(most)


def version_bytes(schedule: Schedule, parameter_bytes: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of each stage's versions beside the newest, at the most."""
    pairs = zip(num_versions(schedule), parameter_bytes, strict=True)
    return tuple((number - 1) * size for number, size in pairs)
