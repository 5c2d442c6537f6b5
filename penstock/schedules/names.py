"""Find a schedule family: by its name, or from what a user gave."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from types import FunctionType
from typing import Any, get_type_hints

from penstock.errors import ConfigError

from .eager_1f1b import eager_1f1b
from .family import Build, Family, check_size
from .gpipe import gpipe
from .interleaved_1f1b import interleaved_1f1b
from .one_f_one_b import one_f_one_b
from .pipedream import pipedream
from .pipedream_2bw import pipedream_2bw

ALL_SCHEDULES = (gpipe, one_f_one_b, eager_1f1b)
"""Every family that takes any number of stages, one to a rank.

A law that holds for schedules is tested on each of them, and on `interleaved_1f1b`.
"""
_INTERLEAVED = interleaved_1f1b.__name__
ASYNCHRONOUS_SCHEDULES = (pipedream(), pipedream(vertical_sync=True), pipedream_2bw)
"""Every family whose weights change within a schedule, one stage to a rank."""
_WITH_ARGUMENTS: Mapping[str, Callable[..., Family]] = {
    _INTERLEAVED: interleaved_1f1b,
    pipedream.__name__: pipedream,
}
_MAKERS: tuple[object, ...] = tuple(_WITH_ARGUMENTS.values())
_WITHOUT = {family.name: family for family in (*ALL_SCHEDULES, pipedream_2bw)}

SCHEDULE_NAMES = (*_WITHOUT, *_WITH_ARGUMENTS)


def family_named(name: str, arguments: Mapping[str, Any]) -> Family:
    """Return the family with this `Family.name` and these `Family.arguments`.

    Raises:
        ConfigError: there is no such family, or it takes other arguments.
    """
    if name not in SCHEDULE_NAMES:
        raise ConfigError(
            f"there is no schedule {name!r}; choose one of {', '.join(SCHEDULE_NAMES)}"
        )
    expected = argument_types(name)
    if expected.keys() != arguments.keys():
        raise ConfigError(
            f"schedule {name} takes the arguments {list(expected)}, and was given "
            f"{list(arguments)}"
        )
    return _WITHOUT[name] if name in _WITHOUT else _WITH_ARGUMENTS[name](**arguments)


def argument_types(name: str) -> Mapping[str, Any]:
    """Return the type of each argument of the family called `name`; none if there is no such."""
    if name not in _WITH_ARGUMENTS:
        return {}
    types = get_type_hints(_WITH_ARGUMENTS[name])
    return {argument: types[argument] for argument in signature(_WITH_ARGUMENTS[name]).parameters}


def named_schedule(name: str, num_stages: int, stages_per_rank: int) -> Family:
    """Return the family called `name`, one of SCHEDULE_NAMES, if it suits these numbers.

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
    if name == pipedream.__name__:
        return pipedream()
    return _WITHOUT[name] if name in _WITHOUT else interleaved_1f1b(stages_per_rank)


def family_of(given: Build, num_microbatches: int) -> Family:
    """Return what a user gave as a schedule as a family.

    A function of the user's own cannot say which ranks run its stages: `ranks` of its family makes
    a schedule of `num_microbatches` to see.

    Raises:
        ConfigError: it makes families, and is none.
    """
    if isinstance(given, Family):
        return given
    name = given.__name__ if isinstance(given, FunctionType | type) else repr(given)
    if isinstance(given, type) or given in _MAKERS:
        raise ConfigError(f"schedule={name} makes schedule families: write schedule={name}()")
    return Family(name, given, deal=_AsBuilt(given, num_microbatches))


@dataclass(frozen=True, slots=True)
class _AsBuilt:
    """Learns the ranks of a function's stages from a schedule that it makes."""

    build: Build
    num_microbatches: int

    def __call__(self, num_stages: int, num_ranks: int) -> tuple[int, ...]:
        schedule = self.build(num_stages, self.num_microbatches)
        check_size(schedule, num_stages, self.num_microbatches)
        return schedule.ranks
