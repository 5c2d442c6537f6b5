"""The ways to run a pipeline that most laws are tried in.

Recomputes meet transports once each; both recomputes meet backwards in two parts.
"""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

import penstock
from benchmarks.all_pairs import all_pairs
from penstock.schedules import gpipe, one_f_one_b
from tests.every_schedule import EVERY_SCHEDULE, IN_TWO_PARTS

WHOLE_STAGES = (penstock.Recompute.STAGE, penstock.Recompute.NEVER)
"""Policies by which a layer runs as often, and in the order, as the schedule says."""
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
    for recompute in WHOLE_STAGES
    for transport in IN_ONE_PROCESS
]


def in_turns(*factors: Iterable[Any]) -> list[Any]:
    """Give each combination of some values, and each schedule, in one way: (*values, way).

    Recompute policies and transports take turns, so that over any four combinations each schedule
    meets all of them together.  Quick are, of one factor, a third, so that each value meets a
    third of the schedules; of several, those in which any two values, or a value and a schedule,
    meet.
    """
    per_schedule = len(EVERY_WAY) // len(EVERY_SCHEDULE)
    chosen = []
    for number, case in enumerate(in_pairs(*factors, named_schedules())):
        *values, _ = case.values
        turn, s = divmod(number, len(EVERY_SCHEDULE))
        way = EVERY_WAY[s * per_schedule + (s + turn) % per_schedule]
        name = f"{case.id}-{way['recompute'].value}-{way['transport'].name}"
        is_slow = (turn + s) % 3 if len(factors) == 1 else case.marks
        marks: Any = pytest.mark.slow if is_slow else []
        chosen.append(pytest.param(*values, way, id=name, marks=marks))
    return chosen


def named_schedules() -> list[Any]:
    return [pytest.param(schedule, id=schedule.name) for schedule in EVERY_SCHEDULE]


def one_each(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Give all pairs of two parameters; one of each first one, with the second ones taking turns,
    is quick, and the others are slow.
    """
    first, second = _named(first), _named(second)
    return [
        pytest.param(
            *one.values,
            *other.values,
            id=f"{one.id}-{other.id}",
            marks=[] if n == number % len(second) else pytest.mark.slow,
        )
        for number, one in enumerate(first)
        for n, other in enumerate(second)
    ]


def in_pairs(*factors: Iterable[Any]) -> list[Any]:
    """Give all combinations of parameters; a few, in which every two of different factors meet,
    are quick, and the others slow.
    """
    named = list(map(_named, factors))
    numbers = [range(len(factor)) for factor in named]
    quick = set(all_pairs(numbers) if len(numbers) > 1 else product(*numbers))
    return [
        pytest.param(
            *(value for own in case for value in own.values),
            id="-".join(own.id for own in case),
            marks=[] if number in quick else pytest.mark.slow,
        )
        for number, case in zip(product(*numbers), product(*named), strict=True)
    ]


def pairwise(*factors: Iterable[Any]) -> list[Any]:
    """Give the quick ones of these, and no others."""
    return [case for case in in_pairs(*factors) if not case.marks]


def _named(values: Iterable[Any]) -> list[Any]:
    """Give parameters, of which those that have no name get one."""
    return [
        value
        if hasattr(value, "marks")
        else pytest.param(value, id=str(getattr(value, "__name__", value)))
        for value in values
    ]
