"""Schedules by name, for recipes and the command line."""

from penstock.errors import ConfigError

from .eager_1f1b import eager_1f1b
from .gpipe import gpipe
from .interleaved_1f1b import interleaved_1f1b
from .lower import ScheduleFunction
from .one_f_one_b import one_f_one_b

ALL_SCHEDULES = (gpipe, one_f_one_b, eager_1f1b)
"""Every schedule function that takes any number of stages, one to a rank.

A law that holds for schedules is tested on each of them, and on `interleaved_1f1b`.
"""
_ONE_STAGE: dict[str, ScheduleFunction] = {each.__name__: each for each in ALL_SCHEDULES}
_INTERLEAVED = interleaved_1f1b.__name__

SCHEDULE_NAMES = (*_ONE_STAGE, _INTERLEAVED)


def named_schedule(name: str, num_stages: int, stages_per_rank: int) -> ScheduleFunction:
    """Give the schedule function called `name`, one of SCHEDULE_NAMES.

    Raises:
        ConfigError: it does not run so many stages on a rank, or they are not dealt out evenly.
    """
    if name == _INTERLEAVED and stages_per_rank == 1:
        raise ConfigError(
            f"schedule {name} runs several stages on each rank, and stages per rank is 1; make it "
            "2 or more"
        )
    if name != _INTERLEAVED and stages_per_rank != 1:
        raise ConfigError(
            f"schedule {name} runs one stage on each rank, and stages per rank is "
            f"{stages_per_rank}; leave that out, or choose {_INTERLEAVED}"
        )
    if num_stages % stages_per_rank:
        raise ConfigError(
            f"{num_stages} stages, {stages_per_rank} per rank, leave a rank with fewer; choose a "
            "number of stages that is a multiple of stages per rank"
        )
    return _ONE_STAGE.get(name) or interleaved_1f1b(stages_per_rank)
