"""Few runs that cover much: every pair of values of two factors meets at least once.

Of these runs a model has three or four; models take turns, so that each meets several schedules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
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
        yield _run(turns, schedule, num_microbatches, num_stages=num_stages)


def few_runs(num_models: int) -> Iterator[tuple[int, Run]]:
    """Give every number of micro-batches with every schedule once, each with a model's number.

    Models and all other factors take turns, so that every two values of two factors meet.
    """
    pairs = product(enumerate(EVERY_SCHEDULE), enumerate(FACTORS["num_microbatches"]))
    for number, ((s, schedule), (m, num_microbatches)) in enumerate(pairs):
        turns = {
            "num_stages": 3 * m + s + s // 2,
            "recompute": 2 * m + 2 * s,
            "transport": m + 3 * s + s // 4,
            "even": m + 3 * s + s // 8,
            "autocast": 3 * m + s // 2,
        }
        yield number % num_models, _run(turns, schedule, num_microbatches)


def _run(turns: dict[str, int], schedule: Any, num_microbatches: int, **options: Any) -> Run:
    """Give a run whose other factors have the values of these turns."""
    options |= {name: FACTORS[name][turn % len(FACTORS[name])] for name, turn in turns.items()}
    return Run(schedule=schedule, num_microbatches=num_microbatches, **options)
