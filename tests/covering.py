"""Few runs that cover much: every pair of values of two factors meets at least once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import penstock
from tests.every_schedule import EVERY_SCHEDULE
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


def many_runs(num_stages: int) -> Iterator[Run]:
    """Give every number of micro-batches with every schedule, policy and transport.

    Even batches and autocast take turns, so that all values of any three factors meet.
    """
    names = ("num_microbatches", "schedule", "recompute", "transport")
    for index, values in enumerate(product(*(FACTORS[name] for name in names))):
        turn = index + index // 4 + index // 16
        options = dict(zip(names, values, strict=True))
        yield Run(
            num_stages=num_stages, even=turn % 2 == 0, autocast=turn // 2 % 2 == 0, **options
        )


def covering_runs(rotation: int) -> list[Run]:
    """Give few runs in which every pair of values of two factors meets; `rotation` varies them.

    Greedy: each run is the one, among all, that brings together the most pairs not yet met.
    """
    candidates = [tuple(v) for v in product(*FACTORS.values())]
    shift = rotation * 37 % len(candidates)
    candidates = candidates[shift:] + candidates[:shift]
    pairs_of = {c: set(combinations(enumerate(c), 2)) for c in candidates}
    missing = set().union(*pairs_of.values())
    chosen = []
    while missing:
        best = max(candidates, key=lambda c: len(pairs_of[c] & missing))
        missing -= pairs_of[best]
        chosen.append(Run(*best))
    return chosen
