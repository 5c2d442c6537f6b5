"""From a schedule family to what the executor runs: the passes in order, then the proof."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from penstock.errors import ConfigError

from .collection import collection_paused
from .family import Family
from .ir import Schedule
from .laws import SYNCHRONOUS, AtMostBytes
from .passes import (
    add_commits,
    add_communication,
    add_offload,
    add_recompute,
    add_reductions,
    backward_half,
    forward_half,
    forwards_first,
    post_receives,
    without_updates,
)
from .transfers import Transfers
from .verify import verify

Make = Callable[[Family, int, int, int], Schedule]
"""(family, num_stages, num_microbatches, num_minibatches) -> what the family makes."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """What a pipeline's schedules have to provide for, whatever the call.

    `ranks[stage]` is who runs a stage.  The stages in `recompute` drop their graphs, those in
    `offload` move what they keep away, those in `commits` have running statistics.  `posts`
    receives early, as processes want it; `reduces` gradients over replicas.
    """

    family: Family
    ranks: tuple[int, ...]
    transfers: Transfers = ()
    recompute: Collection[int] = ()
    offload: Collection[int] = ()
    commits: Collection[int] = ()
    posts: bool = False
    reduces: bool = False


def lower(
    how: Lowering,
    num_microbatches: int,
    mode: Mode = Mode.TRAIN,
    num_minibatches: int = 1,
) -> Schedule:
    """Make a schedule, apply the passes that `mode` needs, and prove the result.

    Only where a whole asynchronous schedule is run do weights change in it, and only for a whole
    schedule does a family's limit of memory hold: the other modes run all forwards first.
    Equal arguments are looked up: the last schedules are kept, if all of `how` can be hashed.

    Raises:
        ScheduleError: the schedule is wrong; see `verify`.
        ConfigError: it is of another size than asked for, or runs a stage on another rank.
    """
    run = _kept if _can_be_hashed(how) else _lower
    return run(how, num_microbatches, mode, num_minibatches)


@collection_paused()
def _lower(how: Lowering, num_microbatches: int, mode: Mode, num_minibatches: int) -> Schedule:
    schedule = lower_unproved(how, num_microbatches, mode, num_minibatches)
    laws = how.family.laws
    if mode is not Mode.TRAIN:
        laws = SYNCHRONOUS if how.family.is_asynchronous else laws
        # what is kept is limited in the order in which a family trains, and in no other
        laws = tuple(law for law in laws if not isinstance(law, AtMostBytes))
    verify(schedule, how.transfers, laws)
    match mode:
        case Mode.TRAIN:
            return schedule
        case Mode.FORWARDS | Mode.EVAL:
            return forward_half(schedule)
        case Mode.BACKWARDS:
            return backward_half(schedule)


@collection_paused()
def lower_unproved(
    how: Lowering,
    num_microbatches: int,
    mode: Mode = Mode.TRAIN,
    num_minibatches: int = 1,
    *,
    make: Make = Family.__call__,
) -> Schedule:
    """Make a whole schedule and apply the passes that `mode` needs; nothing is proved of it.

    For those who price many schedules and run none; with `make` they may look up what a family
    makes.

    Raises:
        ConfigError: it is of another size than asked for, or runs a stage on another rank.
    """
    schedule = _made(how, num_microbatches, num_minibatches, make)
    every = how.family.microbatches_per_update(num_microbatches)
    if mode is not Mode.TRAIN:
        schedule, every = forwards_first(without_updates(schedule)), num_microbatches
    if mode is not Mode.EVAL:
        schedule = _saving_memory(schedule, how)
    schedule = add_communication(add_commits(schedule, how.commits, every), how.transfers)
    if how.reduces and mode is Mode.TRAIN:
        schedule = add_reductions(schedule)
    return post_receives(schedule) if how.posts else schedule


_kept = lru_cache(maxsize=8)(_lower)  # train and evaluate, whole and last batches, of two plans


def _can_be_hashed(how: Lowering) -> bool:
    """Tell whether equal ways to lower can be found: a user's callable may be mutable."""
    try:
        hash(how)
    except TypeError:
        return False
    return True


def _saving_memory(schedule: Schedule, how: Lowering) -> Schedule:
    if how.recompute:
        schedule = add_recompute(schedule, how.recompute)
    return add_offload(schedule, how.offload) if how.offload else schedule


def _made(how: Lowering, num_microbatches: int, num_minibatches: int, make: Make) -> Schedule:
    """Make the schedule, and see that each stage is where the pipeline has it."""
    schedule = make(how.family, len(how.ranks), num_microbatches, num_minibatches)
    if schedule.ranks != how.ranks:
        raise ConfigError(
            f"with {num_microbatches} micro-batches the schedule runs the stages on ranks "
            f"{list(schedule.ranks)}, and the pipeline has them on {list(how.ranks)}; let it deal "
            "out the stages alike for every number of micro-batches (a small batch runs as fewer)"
        )
    return schedule
