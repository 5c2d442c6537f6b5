"""From a schedule function to what the executor runs: the passes in order, then the proof."""

from collections.abc import Callable, Iterable
from enum import Enum

from penstock.errors import ConfigError

from .collection import collection_paused
from .ir import Schedule
from .passes import (
    Edges,
    add_commits,
    add_communication,
    add_recompute,
    add_reductions,
    backward_half,
    forward_half,
    forwards_first,
    post_receives,
)
from .verify import verify

ScheduleFunction = Callable[[int, int], Schedule]
"""(num_stages, num_microbatches) -> Schedule.

Where a rank runs several stages, `stages_per_rank` of the function says how many, so that the
number of stages follows from that of the ranks.
"""


class Mode(Enum):
    """Which part of a schedule a call runs."""

    TRAIN = "train"
    """Everything, as the schedule orders it; the loss is part of the last stage."""
    FORWARDS = "forwards"
    """The forwards of a step whose backwards come later: the loss needs all outputs first."""
    BACKWARDS = "backwards"
    """The backwards that `FORWARDS` left to do."""
    EVAL = "eval"
    """Forwards only, nothing kept."""


def schedule_of(function: ScheduleFunction, num_stages: int, num_microbatches: int) -> Schedule:
    """Call a schedule function.

    Raises:
        ConfigError: it gives a schedule of another size than asked for.
    """
    if isinstance(function, type):
        raise ConfigError(
            f"schedule={function.__name__} is a class, which makes schedule functions: write "
            f"schedule={function.__name__}()"
        )
    schedule = function(num_stages, num_microbatches)
    if (schedule.num_stages, schedule.num_microbatches) != (num_stages, num_microbatches):
        raise ConfigError(
            f"the schedule function was asked for {num_stages} stages and {num_microbatches} "
            f"micro-batches, and gave {schedule.num_stages} and "
            f"{schedule.num_microbatches}:\n{schedule}"
        )
    return schedule


def stage_ranks(schedule: Schedule) -> tuple[int, ...]:
    """Give the rank of each stage; 0 of one that `verify` will miss."""
    ranks = schedule.rank_of()
    return tuple(ranks.get(stage, 0) for stage in range(schedule.num_stages))


@collection_paused()
def lower(  # noqa: PLR0913 - what a lowered schedule depends on, and nothing else
    function: ScheduleFunction,
    num_stages: int,
    num_microbatches: int,
    *,
    edges: Edges,
    recompute: bool,
    committing: Iterable[int],
    mode: Mode,
    posts: bool = False,
    reduces: bool = False,
) -> Schedule:
    """Call a schedule function, apply the passes that `mode` needs, and prove the result.

    `posts` receives early, as processes want it; `reduces` gradients over replicas.

    Raises:
        ScheduleError: the schedule is wrong; see `verify`.
        ConfigError: the function gives a schedule of another size than asked for.
    """
    schedule = schedule_of(function, num_stages, num_microbatches)
    if mode is not Mode.TRAIN:
        schedule = forwards_first(schedule)
    if recompute and mode is not Mode.EVAL:
        schedule = add_recompute(schedule)
    schedule = add_communication(add_commits(schedule, committing), edges)
    if reduces and mode is Mode.TRAIN:
        schedule = add_reductions(schedule)
    if posts:
        schedule = post_receives(schedule)
    verify(schedule, edges)
    match mode:
        case Mode.TRAIN:
            return schedule
        case Mode.FORWARDS | Mode.EVAL:
            return forward_half(schedule)
        case Mode.BACKWARDS:
            return backward_half(schedule)
