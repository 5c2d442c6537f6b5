"""Enumerate the sizes of pipelines and the schedule families that a planner tries."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from penstock.costs.cluster import Cluster
from penstock.errors import ConfigError, check_count
from penstock.schedules.costs import Costs
from penstock.schedules.family import Family
from penstock.schedules.names import SCHEDULE_NAMES, families_for, schedule_name, suits
from penstock.trace.units import count_text
from penstock.types import Transport, word_of

_FEW = 16
"""Up to so many devices every number of stages is looked at; beyond, those that divide evenly."""
_MOST_FOR_LISTS = 4096
"""Stages times micro-batches up to which families are looked at that are made for their costs."""
_ENOUGH_PER_RANK, _ENOUGH_IN_ALL, _LEAST_PER_STAGE = 32, 1 << 14, 4
_LEAN = ("one_f_one_b", "interleaved_1f1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Decisions that a user has made; None leaves one to the planner.

    `memory_share` is how much of a device's memory may be used: allocators need the rest.
    `schedules` are names of families, such as "1f1b".
    """

    batch_size: int
    num_ranks: int | None = None
    num_replicas: int | None = None
    num_microbatches: int | None = None
    schedules: tuple[str, ...] | None = None
    stages_per_rank: tuple[int, ...] = (1, 2)
    transport: Transport | None = None
    memory_share: float = 0.9
    offload: bool = True

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        for name in ("num_ranks", "num_replicas", "num_microbatches"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.schedules is not None:
            object.__setattr__(self, "schedules", tuple(map(schedule_name, self.schedules)))
        if self.transport is not None:
            object.__setattr__(self, "transport", word_of("transport", self.transport, Transport))
        if not 0 < self.memory_share <= 1:
            raise ConfigError(
                f"memory_share={self.memory_share}; it must be above 0 and at most 1, as 0.9"
            )


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """The size of a pipeline: ranks per replica, replicas, micro-batches, stages per rank.

    `places` are the cluster's devices of the ranks; empty: the first ones, in order.
    `stages` is the number of all stages where ranks have unlike numbers; else 0.
    """

    num_ranks: int
    num_replicas: int
    num_microbatches: int
    stages_per_rank: int = 1
    places: tuple[int, ...] = ()
    stages: int = 0

    @property
    def num_stages(self) -> int:
        """K."""
        return self.stages or self.num_ranks * self.stages_per_rank

    def microbatch_size(self, batch_size: int) -> int:
        """Return the samples of the largest micro-batch."""
        return -(-batch_size // (self.num_replicas * self.num_microbatches))


def sizes(asked: Constraints, cluster: Cluster, threads: int, num_spans: int) -> Iterator[Size]:
    """Yield the sizes to try where each rank has `threads` threads of its host.

    They include the unsplit model, on one device and in as many replicas as fit, unless another
    number of ranks is asked for.

    Raises:
        ConfigError: the batch has fewer samples than there are to be replicas.
    """
    num_devices = len(cluster.places) // threads or 1
    if asked.num_replicas is not None and asked.batch_size < asked.num_replicas:
        raise ConfigError(
            f"batch_size={asked.batch_size} for num_replicas={asked.num_replicas}: each needs a "
            "sample; give a larger batch or fewer replicas"
        )
    for num_ranks in _numbers_of_ranks(asked, num_devices, num_spans):
        for num_replicas in _numbers_of_replicas(asked, num_devices // num_ranks):
            samples = asked.batch_size // num_replicas
            per_rank = asked.stages_per_rank if num_ranks > 1 else (1,)
            fitting = [v for v in per_rank if num_ranks * v <= num_spans]
            parts = _numbers_of_microbatches(asked, num_ranks, samples)
            for stages_per_rank, num_microbatches in product(fitting, parts):
                yield Size(num_ranks, num_replicas, num_microbatches, stages_per_rank)


def why_no_size(asked: Constraints, cluster: Cluster, threads: int, num_spans: int) -> str:
    """Return an error text: the constraint that leaves no size, and what to change."""
    num_devices = len(cluster.places) // threads or 1
    ranks, replicas = asked.num_ranks or 1, asked.num_replicas or 1
    parts = asked.num_microbatches or 1
    # One case for each bound in `sizes`, in the same order; the last is `can_run`.
    if ranks > num_spans:
        return (
            f"num_ranks={ranks}, and the model can be cut into "
            f"{count_text(num_spans, 'stage')} at most; ask for at most "
            f"{count_text(num_spans, 'rank')}"
        )
    if ranks * replicas > num_devices:
        return (
            f"num_ranks={ranks} and num_replicas={replicas} need {ranks * replicas} devices, and "
            f"the cluster {cluster.name} has room for {count_text(num_devices, 'rank')} of "
            f"{count_text(threads, 'thread')}; "
            "ask for fewer, or give a larger cluster"
        )
    if asked.batch_size < replicas * parts:
        return (
            f"batch_size={asked.batch_size} for num_replicas={replicas} of "
            f"num_microbatches={parts}: each micro-batch needs a sample; give a batch of at least "
            f"{replicas * parts}, or fewer of them"
        )
    return (
        f"stages_per_rank={asked.stages_per_rank} on num_ranks={asked.num_ranks} with "
        f"schedules={asked.schedules}: none of these schedules runs so many stages on a rank, or "
        f"the model, of {num_spans} stages at most, has too few; change one of them"
    )


def families(asked: Constraints, size: Size, costs: Costs) -> Iterator[Family]:
    """Yield the families to try, made for `costs` if they take any, the least memory first."""
    names = [x for x in asked.schedules or SCHEDULE_NAMES if suits(x, size.stages_per_rank)]
    made = families_for(costs, size.stages_per_rank)
    yield from sorted(
        (x for x in made if x.name in names and not (is_large(size) and takes_costs(x))),
        key=lambda family: family.name not in _LEAN,
    )


def is_large(size: Size) -> bool:
    """Tell whether making schedules for costs would take too long."""
    return size.num_stages * size.num_microbatches > _MOST_FOR_LISTS


def takes_costs(family: Family) -> bool:
    """Tell whether a family's schedules are made for costs."""
    return "costs" in dict(family.arguments)


def can_run(asked: Constraints, size: Size) -> bool:
    """Tell whether any schedule that is wanted has so many stages on a rank."""
    names = asked.schedules or SCHEDULE_NAMES
    return any(suits(name, size.stages_per_rank) for name in names)


def _numbers_of_ranks(asked: Constraints, num_devices: int, num_spans: int) -> Sequence[int]:
    if asked.num_ranks is not None:
        return (asked.num_ranks,)
    most = min(num_devices, num_spans)
    numbers = range(1, most + 1)
    if most <= _FEW:
        return numbers
    return [n for n in numbers if n <= _FEW // 2 or num_devices % n == 0 or n == most]


def _numbers_of_replicas(asked: Constraints, room: int) -> Sequence[int]:
    """Return numbers of replicas to try: the most, the most that divide the batch, and 1."""
    if asked.num_replicas is not None:
        return (asked.num_replicas,) if asked.num_replicas <= room else ()
    most = min(room, asked.batch_size)
    evenly = (n for n in range(most, 0, -1) if asked.batch_size % n == 0)
    return sorted({n for n in (most, next(evenly, 0), 1) if 0 < n <= room})


def _numbers_of_microbatches(asked: Constraints, num_ranks: int, samples: int) -> Sequence[int]:
    if asked.num_microbatches is not None:
        return (asked.num_microbatches,) if asked.num_microbatches <= samples else ()
    powers = [2**n for n in range(samples.bit_length())]
    multiples = [num_ranks * times for times in (1, 2, 3, 4, 6, 8, 12, 16)]
    return sorted({n for n in (*powers, *multiples) if n <= samples})


def is_long(size: Size) -> bool:
    """Tell whether a size has so many micro-batches that it is tried only if fewer do not fit.

    More of them would gain a few per cent of bubble at most.
    """
    enough = min(_ENOUGH_PER_RANK * size.num_ranks, _ENOUGH_IN_ALL // size.num_stages)
    return size.num_microbatches > max(enough, _LEAST_PER_STAGE * size.num_stages)
