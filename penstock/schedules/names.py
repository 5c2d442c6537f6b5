"""Find a schedule family by its name, or from a user's argument."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from types import FunctionType
from typing import Any, cast, get_type_hints

from penstock.errors import ConfigError, shown
from penstock.types import letters_of

from .controllable_memory import v_half, v_min
from .costs import Costs
from .critical_path import critical_path
from .dualpipe_v import dualpipe_v
from .family import Build, Chosen, Family, check_size
from .interleaved import breadth_first, interleaved_1f1b, wave
from .ir import Schedule
from .one_f_one_b import eager_1f1b, gpipe, one_f_one_b
from .pipedream import pipedream, pipedream_2bw
from .searched import searched
from .segmented import segmented
from .torch_csv import from_csv, to_csv
from .zero_bubble import zb_h1, zb_h2, zb_v

Maker = Callable[..., Family]
"""A function that makes a family; each argument has a default."""

SYNCHRONOUS_FAMILIES: tuple[Family | Maker, ...] = (
    gpipe,
    one_f_one_b,
    eager_1f1b,
    zb_h1,
    zb_h2,
    interleaved_1f1b,
    breadth_first,
    wave,
    zb_v,
    v_half,
    v_min,
    dualpipe_v,
    critical_path,
)
"""The families whose step gives the unsplit model's gradients, or their makers.

A law that holds for such schedules is tested on each of them.
"""
ASYNCHRONOUS_FAMILIES: tuple[Family | Maker, ...] = (pipedream, pipedream_2bw)
"""The families whose weights change within a schedule, or their makers."""
_EVERY_FAMILY = (*SYNCHRONOUS_FAMILIES, *ASYNCHRONOUS_FAMILIES)


def by_default(family: Family | Maker, **values: Any) -> Family:
    """Return a family, a maker's by its defaults but for those of `values` that it takes."""
    if isinstance(family, Family):
        return family
    taken = signature(family).parameters.keys() & values.keys()
    return family(**{name: values[name] for name in taken if values[name]})


_NAMED = {by_default(family).name: family for family in _EVERY_FAMILY}
SCHEDULE_NAMES = (*_NAMED,)
"""The names of families in recipes and commands."""
ALIASES: Mapping[str, str] = {
    "1f1b": "one_f_one_b",
    "interleaved": "interleaved_1f1b",
    "looped-bfs": "breadth_first",
    "zbv-zero-bubble": "zb_v",
}
"""Other names of families.  Of any name only letters and digits count: "ZB-H1" is zb_h1."""
_MADE: tuple[Callable[..., Any], ...] = (searched, segmented, from_csv)
"""Makers of families that need more than a name."""
_IN_FILES = {**_NAMED, **{maker.__name__: maker for maker in _MADE}}
NAMES_IN_FILES = (*_IN_FILES,)
"""The names of families that a plan's file can hold, with their arguments."""
_STAGES_PER_RANK = "stages_per_rank"
ALL_SCHEDULES = tuple(
    family for family in map(by_default, SYNCHRONOUS_FAMILIES) if family.stages_per_rank == 1
)
"""The synchronous families with one stage on each rank: they take any number of stages."""
ASYNCHRONOUS_SCHEDULES = (pipedream(), pipedream(vertical_sync=True), pipedream_2bw)
"""The asynchronous families, with each value of their arguments."""
ASYNCHRONOUS_NAMES = tuple(by_default(family).name for family in ASYNCHRONOUS_FAMILIES)
"""The names of the asynchronous families."""


def family_named(name: str, arguments: Mapping[str, Any]) -> Family:
    """Return the family of this name and these arguments; a ConfigError if there is none."""
    if name not in NAMES_IN_FILES:
        raise ConfigError(
            f"there is no schedule {name!r}; choose one of {', '.join(NAMES_IN_FILES)}"
        )
    expected = argument_types(name)
    if expected.keys() != arguments.keys():
        raise ConfigError(
            f"schedule {name} takes the arguments {list(expected)}, and was given "
            f"{list(arguments)}"
        )
    maker = _IN_FILES[name]
    if maker is from_csv:  # a file of a plan holds the text itself, never a path to open
        return from_csv(f"{arguments['source']}\n")
    return maker if isinstance(maker, Family) else maker(**arguments)


def argument_types(name: str) -> Mapping[str, Any]:
    """Return the type of each argument of the family called `name`; none if there is no such."""
    maker = _IN_FILES.get(name)
    if maker is None or isinstance(maker, Family):
        return {}
    types = get_type_hints(maker)
    return {argument: types[argument] for argument in signature(maker).parameters}


def families_for(costs: Costs, stages_per_rank: int) -> Iterator[Family]:
    """Yield the synchronous families with so many stages on a rank, made for these costs."""
    for maker in SYNCHRONOUS_FAMILIES:
        family = by_default(maker, costs=costs, stages_per_rank=stages_per_rank)
        if family.stages_per_rank == stages_per_rank:
            yield family


def named_schedule(
    name: str, num_stages: int, stages_per_rank: int | None = None, costs: Costs | None = None
) -> Family:
    """Return the family called `name` if it suits these numbers, made for `costs` if it takes any.

    The name is one of SCHEDULE_NAMES, or `searched` if there are costs.  Without stages per rank,
    the family's default holds.

    Raises:
        ConfigError: it does not run so many stages on a rank, or they are not dealt out evenly.
    """
    # 1. Make the family with those of the values that it takes.
    if stages_per_rank == 1 and _STAGES_PER_RANK in argument_types(name):
        raise ConfigError(
            f"schedule {name} runs several stages on each rank, and stages per rank is 1; make it "
            "2 or more"
        )
    family = by_default(_IN_FILES[name], costs=costs, stages_per_rank=stages_per_rank)
    # 2. Check that the stages per rank suit it, and that ranks have equally many.
    expected = family.stages_per_rank
    if expected != (stages_per_rank or expected):
        runs, remedy = (
            ("one stage", f"leave that out, or choose {interleaved_1f1b.__name__}")
            if expected == 1
            else (f"{expected} stages", f"make it {expected}")
        )
        raise ConfigError(
            f"schedule {name} runs {runs} on each rank, and stages per rank is "
            f"{stages_per_rank}; {remedy}"
        )
    if num_stages % expected:
        raise ConfigError(
            f"{num_stages} stages, {expected} per rank, leave a rank with fewer; choose a "
            "number of stages that is a multiple of stages per rank"
        )
    return family


def suits(name: str, stages_per_rank: int) -> bool:
    """Tell whether the family called `name`, of SCHEDULE_NAMES, can have so many stages a rank."""
    try:
        named_schedule(name, stages_per_rank, stages_per_rank)
    except ConfigError:
        return False
    return True


def least_stages_per_rank(name: str) -> int:
    """Return the default number of stages on a rank of a family of SCHEDULE_NAMES."""
    return by_default(_NAMED[name]).stages_per_rank


def stages_on_ranks() -> str:
    """List the families with several stages on a rank, and their numbers, for help texts."""
    is_open = {name: _STAGES_PER_RANK in argument_types(name) for name in _NAMED}
    several = [n for n in _NAMED if least_stages_per_rank(n) > 1 and not is_open[n]]
    of_choice = [name for name in _NAMED if is_open[name]]
    return f"2 for {', '.join(several)}; 2 or more for {', '.join(of_choice)}"


def schedule_name(name: str) -> str:
    """Return the name, of SCHEDULE_NAMES, of the family that `name` means.

    Raises:
        ConfigError: there is none.
    """
    known = {letters_of(alias): full for alias, full in ALIASES.items()}
    known |= {letters_of(full): full for full in SCHEDULE_NAMES}
    if letters_of(name) not in known:
        aliases = ", ".join(f"{alias} for {full}" for alias, full in ALIASES.items())
        raise ConfigError(
            f"there is no schedule {name!r}; choose one of {', '.join(SCHEDULE_NAMES)} (also "
            f"{aliases})"
        )
    return known[letters_of(name)]


def family_of(schedule: Chosen, num_microbatches: int) -> Family:
    """Return a user's `schedule` argument as a family: the one named, or made by its defaults.

    A user's function does not state the ranks of its stages.  `ranks` of its family makes a
    schedule of `num_microbatches` to see them.  A `Schedule` becomes a family of one size, like a
    schedule from a file: its forwards and backwards count.

    Raises:
        ConfigError: it is no schedule, or a maker of families that needs arguments.
        ScheduleError: it is a `Schedule`, and cannot run.
    """
    if isinstance(schedule, Schedule):
        return from_csv(to_csv(schedule))
    if isinstance(schedule, str):
        return by_default(_NAMED[schedule_name(schedule)])
    if isinstance(schedule, Family) or schedule in _EVERY_FAMILY:
        return by_default(schedule)
    if isinstance(schedule, type) or schedule in _MADE or not callable(schedule):
        raise ConfigError(
            f'schedule={shown(schedule)} is no schedule; give a name, such as "1f1b", a family, '
            "such as schedules.interleaved_1f1b(stages_per_rank=2), a Schedule, or a function "
            "(num_stages, num_microbatches) -> Schedule; schedules.from_csv(path) reads one"
        )
    name = schedule.__name__ if isinstance(schedule, FunctionType) else repr(schedule)
    own = cast(Build, schedule)
    return Family(name, own, deal=_AsBuilt(own, num_microbatches))


@dataclass(frozen=True, slots=True)
class _AsBuilt:
    """Learns the ranks of a function's stages from a schedule that it makes."""

    build: Build
    num_microbatches: int

    def __call__(self, num_stages: int, num_ranks: int) -> tuple[int, ...]:
        schedule = self.build(num_stages, self.num_microbatches)
        check_size(schedule, num_stages, self.num_microbatches)
        return schedule.ranks
