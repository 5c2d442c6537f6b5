"""Few runs that cover much: every pair of values of two factors meets at least once.

Of the schedules a model meets a few; models take turns, so that each meets several models.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import penstock
from benchmarks.all_pairs import all_pairs
from tests.every_schedule import EVERY_SCHEDULE, some_schedules
from tests.ways import IN_ONE_PROCESS

FACTORS: dict[str, Sequence[Any]] = {
    "num_microbatches": (1, 2, 3, 4, 8),
    "num_stages": (1, 2, 3, 4),
    "even": (True, False),
    "schedule": EVERY_SCHEDULE,
    "recompute": tuple(penstock.Recompute),
    "transport": IN_ONE_PROCESS,
    "autocast": (False, True),
}
"""What a gradient must not depend on, and the sizes it does depend on."""


@dataclass(frozen=True, slots=True)
class Run:
    """One way to train a model."""

    num_microbatches: int
    num_stages: int
    even: bool
    schedule: Any
    recompute: penstock.Recompute
    transport: penstock.Transport
    autocast: bool

    @property
    def num_samples(self) -> int:
        """Two samples per micro-batch, or one micro-batch with one more."""
        return 2 * self.num_microbatches + (not self.even)

    def __str__(self) -> str:
        words = (
            f"K{self.num_stages}",
            f"M{self.num_microbatches}",
            f"N{self.num_samples}",
            self.schedule.name,
            f"recompute_{self.recompute.value}",
            self.transport.name.lower(),
            "bf16" if self.autocast else "fp32",
        )
        return "-".join(words)


def many_runs(rotation: int) -> Iterator[Run]:
    """Give every number of micro-batches with every schedule, in one number of stages.

    The other factors take turns, so that all values of any three factors meet over four
    rotations, of which the first is a multiple of four.
    """
    num_stages = FACTORS["num_stages"][rotation % len(FACTORS["num_stages"])]
    r, k = rotation // len(FACTORS["num_stages"]), num_stages
    pairs = product(enumerate(FACTORS["num_microbatches"]), enumerate(EVERY_SCHEDULE))
    for (m, num_microbatches), (s, schedule) in pairs:
        turns = {
            "recompute": r + k + m + s,
            "transport": r // 2 + k // 2 + m // 2 + s // 2,
            "even": r // 4 + k + k // 2 + m + s // 4,
            "autocast": r // 8 + k + m // 2 + s // 8,
        }
        options = {name: FACTORS[name][turn % len(FACTORS[name])] for name, turn in turns.items()}
        yield Run(
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            schedule=schedule,
            **options,
        )


def covering_runs(rotation: int) -> list[Run]:
    """Give few runs in which every pair of values of two factors meets; `rotation` varies them."""
    factors = FACTORS | {"schedule": some_schedules(rotation)}
    return [Run(*values) for values in all_pairs(tuple(factors.values()), shift=rotation * 37)]


def few_runs(rotations: int) -> Iterator[tuple[int, Run]]:
    """Give an eighth of the covering runs of each rotation, and of the others those without which
    two values would not meet in any rotation.
    """
    every = [list(enumerate(covering_runs(n))) for n in range(rotations)]
    chosen = {
        (n, i): run for n, runs in enumerate(every) for i, run in runs if i % 8 == (n + 2) % 8
    }
    met = set().union(*map(pairs_of, chosen.values()))
    for n, runs in enumerate(every):
        for i, run in runs:
            if not pairs_of(run) <= met:
                chosen[n, i] = run
                met |= pairs_of(run)
    return ((n, chosen[n, i]) for n, i in sorted(chosen))


def pairs_of(run: Run) -> set[Any]:
    """Give every two factors with their values."""
    return set(combinations(((name, getattr(run, name)) for name in FACTORS), 2))
