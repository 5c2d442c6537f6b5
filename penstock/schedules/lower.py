"""Lower a schedule family to the executor's programs: the passes in order, then the proof."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from penstock.errors import ConfigError

from .family import Family
from .ir import Schedule
from .laws import SYNCHRONOUS, AtMostBytes, verify
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
from .walk import collection_paused

Make = Callable[[Family, int, int, int], Schedule]
"""(family, num_stages, num_microbatches, num_minibatches) -> the family's schedule."""


class Mode(Enum):
    """The part of a schedule that a call runs."""

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
    """The properties of a pipeline that decide its passes, the same for every call."""

    family: Family
    ranks: tuple[int, ...]
    """The rank that runs each stage."""
    transfers: Transfers = ()
    recompute: Collection[int] = ()
    """The stages that drop their graphs."""
    by_layers: Collection[int] = ()
    """Those of them that do so layer by layer."""
    offload: Collection[int] = ()
    """The stages that move their activations away."""
    commits: Collection[int] = ()
    """The stages with running statistics."""
    posts: bool = False
    """True: receives are posted early, as between processes."""
    reduces: bool = False
    """True: gradients are summed over replicas."""


def lower(
    how: Lowering,
    num_microbatches: int,
    mode: Mode = Mode.TRAIN,
    num_minibatches: int = 1,
) -> Schedule:
    """Make a schedule, apply the passes that `mode` needs, and prove the result.

    All modes but TRAIN run all forwards first.  They change no weights, and do not obey a family's
    limit of memory.  The last schedules are cached, if `how` can be hashed.

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
        # a limit of memory holds for the order in which a family trains, and for no other
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
    """Make a whole schedule and apply the passes that `mode` needs, without a proof; a ConfigError
    if it is of another size than asked for, or runs a stage on another rank.

    Planners use it to price many schedules.  With `make` they may look up a family's schedule.
    """
    schedule = _made(how, num_microbatches, num_minibatches, make)
    per_update = how.family.microbatches_per_update(num_microbatches)
    if mode is not Mode.TRAIN:
        schedule, per_update = forwards_first(without_updates(schedule)), num_microbatches
    if how.recompute and mode is not Mode.EVAL:
        schedule = add_recompute(schedule, how.recompute, how.by_layers)
    if how.offload and mode is not Mode.EVAL:
        schedule = add_offload(schedule, how.offload)
    schedule = add_communication(add_commits(schedule, how.commits, per_update), how.transfers)
    if how.reduces and mode in (Mode.TRAIN, Mode.BACKWARDS):
        schedule = add_reductions(schedule)
    return post_receives(schedule) if how.posts else schedule


_kept = lru_cache(maxsize=8)(_lower)  # train and evaluate, whole and last batches, of two plans


def _can_be_hashed(how: Lowering) -> bool:
    """Tell whether `how` can be a key of the cache: a user's callable may be mutable."""
    try:
        hash(how)
    except TypeError:
        return False
    return True


def _made(how: Lowering, num_microbatches: int, num_minibatches: int, make: Make) -> Schedule:
    """Make the schedule, and check that each stage is on the pipeline's rank for it."""
    schedule = make(how.family, len(how.ranks), num_microbatches, num_minibatches)
    if schedule.ranks != how.ranks:
        raise ConfigError(
            f"with {num_microbatches} micro-batches the schedule runs the stages on ranks "
            f"{list(schedule.ranks)}, and the pipeline has them on {list(how.ranks)}; let it deal "
            "out the stages alike for every number of micro-batches (a small batch runs as fewer)"
        )
    return schedule
