"""The words of the command line with the values they stand for, and its exit codes."""

from penstock.schedules import ALL_SCHEDULES

SCHEDULES = {function.__name__: function for function in ALL_SCHEDULES}
SCHEDULE_NAMES = tuple(SCHEDULES)

USER_ERROR = 2
INTERRUPTED = 130
