"""Schedule families: each makes schedules of any size, and states their ranks and laws."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum

from penstock.errors import ConfigError, check_count

from .costs import Costs
from .ir import Schedule
from .laws import SYNCHRONOUS, Law

Build = Callable[[int, int], Schedule]
"""(num_stages, num_microbatches) -> Schedule: a family, or a function of the user's own."""
Deal = Callable[[int, int], tuple[int, ...]]
"""(num_stages, num_ranks) -> the rank of each stage."""
Argument = Hashable
"""A number, None, or a tuple or frozen dataclass of these, such as costs.  A file can hold it.
Families with equal arguments are equal."""


def in_turn(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """Deal stages out to ranks in turn: rank r runs stages r, r + R, r + 2 R, and so on."""
    return tuple(stage % num_ranks for stage in range(num_stages))


@dataclass(frozen=True, slots=True)
class OnRanks:
    """Deals stages out by `ranks`; a ConfigError for another number of stages."""

    name: str
    ranks: tuple[int, ...]

    def __call__(self, num_stages: int, num_ranks: int) -> tuple[int, ...]:
        if len(self.ranks) != num_stages:
            raise ConfigError(
                f"this {self.name}, of stages on ranks {self.ranks}, is for {len(self.ranks)} "
                f"stages, and there are {num_stages}: make one for as many"
            )
        return self.ranks


class Updates(Enum):
    """The times at which weights change."""

    AFTER = "after"
    """After the step: the caller's optimizer moves all weights at once."""
    EACH_MINIBATCH = "each mini-batch"
    """Within the schedule, on each stage, once for every mini-batch."""
    EACH_MICROBATCH = "each micro-batch"
    """Within the schedule, on each stage, once for every micro-batch."""


def zigzag(num_stages: int, num_ranks: int) -> tuple[int, ...]:
    """Deal stages out to ranks there and back: a V on two stages a rank, a W on four.

    At each turn a rank runs two stages in a row, between which nothing is sent.
    """
    there_and_back = (*range(num_ranks), *reversed(range(num_ranks)))
    return tuple(there_and_back[stage % (2 * num_ranks)] for stage in range(num_stages))


@dataclass(frozen=True, slots=True)
class Family:
    """A schedule family: calling it makes a schedule, and `ranks` needs no schedule.

        one_f_one_b(num_stages=3, num_microbatches=4)
        interleaved_1f1b(stages_per_rank=2)(num_stages=8, num_microbatches=4)

    Printing a family gives the expression that a user writes for it.  A family whose weights
    change within a schedule (`updates`) is asynchronous.  It also makes schedules of several
    mini-batches, one after the other without a flush.

    Raises:
        ConfigError: an argument called `costs` is neither Costs nor None.
    """

    name: str
    build: Callable[..., Schedule]
    """The function of the numbers of stages and micro-batches (and of mini-batches, if it is
    asynchronous), and of `arguments` by name."""
    stages_per_rank: int = 1
    arguments: tuple[tuple[str, Argument], ...] = ()
    deal: Deal = in_turn
    laws: tuple[Law, ...] = SYNCHRONOUS
    """The laws that each of its schedules obeys."""
    updates: Updates = Updates.AFTER
    most_microbatches: int | None = None
    """The micro-batches of its one schedule, if it has only one, which may run with fewer."""

    def __post_init__(self) -> None:
        costs = dict(self.arguments).get("costs")
        if not isinstance(costs, Costs | None):
            raise ConfigError(
                f"{self.name}(costs={costs!r:.80}): give Costs(forward_s=..., backward_s=..., "
                "recompute_s=...), or measured_costs(pipe.last_timeline) of a step with trace=True"
            )

    @property
    def is_asynchronous(self) -> bool:
        """True if weights change while micro-batches are in flight."""
        return self.updates is not Updates.AFTER

    def microbatches_per_update(self, num_microbatches: int) -> int:
        """Return the micro-batches of one update, if a mini-batch has `num_microbatches`."""
        return 1 if self.updates is Updates.EACH_MICROBATCH else num_microbatches

    def num_ranks(self, num_stages: int) -> int:
        """Return the number of ranks that run `num_stages` stages.

        Raises:
            ConfigError: the stages cannot be dealt out to ranks evenly.
        """
        per_rank = self.stages_per_rank
        num_ranks, rest = divmod(num_stages, per_rank)
        if rest or not num_ranks:
            raise ConfigError(
                f"num_stages={num_stages} is not a multiple of stages_per_rank={per_rank}; "
                f"num_stages counts the stages of all ranks: choose "
                f"{per_rank * max(1, num_ranks)} or {per_rank * (num_ranks + 1)} stages, or "
                "another stages_per_rank"
            )
        return num_ranks

    def ranks(self, num_stages: int) -> tuple[int, ...]:
        """Return the rank of each stage.

        Raises:
            ConfigError: the stages cannot be dealt out to ranks evenly.
        """
        return self.deal(num_stages, self.num_ranks(num_stages))

    def __call__(
        self, num_stages: int, num_microbatches: int, num_minibatches: int = 1
    ) -> Schedule:
        """Make the schedule of one mini-batch, or of several of `num_microbatches` each.

        Raises:
            ConfigError: a number is no whole one of at least 1, the stages cannot be dealt out to
                ranks evenly, several mini-batches are asked of a family that has one in a step,
                or `build` makes a schedule of another size than asked for.
        """
        check_count("num_stages", num_stages)
        check_count("num_microbatches", num_microbatches)
        check_count("num_minibatches", num_minibatches)
        self.num_ranks(num_stages)
        sizes = [num_stages, num_microbatches]
        if self.is_asynchronous:
            sizes.append(num_minibatches)
        elif num_minibatches != 1:
            raise ConfigError(
                f"a schedule of {self!r} is one mini-batch, and {num_minibatches} were asked for; "
                "asynchronous schedules, such as pipedream_2bw, have several"
            )
        schedule = self.build(*sizes, **dict(self.arguments))
        check_size(schedule, num_stages, num_microbatches * num_minibatches)
        return schedule

    def __repr__(self) -> str:
        return self._written(repr)

    def __str__(self) -> str:
        """Write it as `repr` does, but costs, which fill lines, as dots."""
        return self._written(lambda value: "..." if isinstance(value, Costs) else repr(value))

    def _written(self, write: Callable[[Argument], str]) -> str:
        pairs = (f"{name}={write(value)}" for name, value in self.arguments if value is not None)
        return f"{self.name}({', '.join(pairs)})" if self.arguments else self.name


Chosen = Build | Callable[..., Family] | Schedule | str
"""A schedule as a user may give it: see `names.family_of`."""


def check_size(schedule: Schedule, num_stages: int, num_microbatches: int) -> None:
    """Raise a ConfigError for a schedule of another size than its function was asked for."""
    if (schedule.num_stages, schedule.num_microbatches) != (num_stages, num_microbatches):
        raise ConfigError(
            f"the schedule function was asked for {num_stages} stages and {num_microbatches} "
            f"micro-batches, and gave {schedule.num_stages} and "
            f"{schedule.num_microbatches}:\n{schedule}"
        )
