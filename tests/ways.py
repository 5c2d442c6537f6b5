"""The ways to run a pipeline that most laws are tried in.

Recomputes meet transports once each; both recomputes meet backwards in two parts.
"""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

import penstock
from penstock.schedules import gpipe, one_f_one_b
from tests.every_schedule import EVERY_SCHEDULE, IN_TWO_PARTS

IN_ONE_PROCESS = tuple(t for t in penstock.Transport if not t.is_between_processes)

WAYS = [
    pytest.param(
        {"schedule": s, "recompute": r, "transport": t}, id=f"{s.name}-{r.value}-{t.name}"
    )
    for s, r, t in (
        (gpipe, penstock.Recompute.STAGE, penstock.Transport.THREADS),
        (one_f_one_b, penstock.Recompute.NEVER, penstock.Transport.LOOPBACK),
        (IN_TWO_PARTS, penstock.Recompute.STAGE, penstock.Transport.LOOPBACK),
        (IN_TWO_PARTS, penstock.Recompute.NEVER, penstock.Transport.THREADS),
    )
]

EVERY_WAY: list[dict[str, Any]] = [
    {"schedule": schedule, "recompute": recompute, "transport": transport}
    for schedule in EVERY_SCHEDULE
    for recompute in penstock.Recompute
    for transport in IN_ONE_PROCESS
]


def in_turns(*factors: Iterable[Any]) -> list[Any]:
    """Give each combination of some values, and each schedule, in one way: (*values, way).

    Recompute policies and transports take turns, so that over any four combinations each schedule
    meets all of them together.
    """
    chosen = []
    per_schedule = len(EVERY_WAY) // len(EVERY_SCHEDULE)
    for turn, values in enumerate(product(*factors)):
        for s, schedule in enumerate(EVERY_SCHEDULE):
            way = EVERY_WAY[s * per_schedule + (s + turn) % per_schedule]
            words = (*map(_word, values), schedule.name, way["recompute"].value)
            name = "-".join((*words, way["transport"].name))
            chosen.append(pytest.param(*values, way, id=name))
    return chosen


def _word(value: Any) -> str:
    return str(getattr(value, "__name__", value))
