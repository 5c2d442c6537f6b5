"""The ways to run a pipeline that most laws are tried in.

Recomputes meet transports once each; both recomputes meet backwards in two parts.
"""

import pytest

import penstock
from penstock.schedules import gpipe, one_f_one_b
from tests.every_schedule import EVERY_SCHEDULE, IN_TWO_PARTS

IN_ONE_PROCESS = tuple(t for t in penstock.Transport if not t.is_between_processes)
BETWEEN_PROCESSES = tuple(t for t in penstock.Transport if t.is_between_processes)
"""All transports; each law runs over those of its kind."""

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

EVERY_WAY = [
    pytest.param(
        {"schedule": schedule, "recompute": recompute, "transport": transport},
        id=f"{schedule.name}-{recompute.value}-{transport.name}",
    )
    for s, schedule in enumerate(EVERY_SCHEDULE)
    for t, transport in enumerate(penstock.Transport)
    for recompute in (list(penstock.Recompute)[(s + t) % len(penstock.Recompute)],)
]
"""Every schedule with every transport; recompute policies take turns."""
