"""The words of the command line and the values they stand for."""

from penstock.schedules import ALL_SCHEDULES

SCHEDULES = {function.__name__: function for function in ALL_SCHEDULES}
SCHEDULE_NAMES = tuple(SCHEDULES)
