"""Law: no rank waits for ever."""

from penstock.schedules.walk import walk_runs

from .lanes import Lanes


def ends(lanes: Lanes) -> None:
    """Check that a walk reaches the end of every program."""
    for _ in walk_runs(lanes.schedule):
        pass
