"""Law: no rank waits for ever."""

from penstock.schedules.walk import walk

from .lanes import Lanes


def ends(lanes: Lanes) -> None:
    """Check that a walk reaches the end of every program."""
    for _ in walk(lanes.schedule):
        pass
