"""torch.distributed.pipelining on emulated devices: one process a rank."""

from torch import distributed as dist

from benchmarks.throughput.processes import Key, Part
from benchmarks.throughput.torch_peer import PREFIX, SCHEDULES, own_stages, part, ranks_of
from benchmarks.zero_bubble.emulated import Work


def can_run(schedule: str, num_ranks: int, num_microbatches: int) -> bool:
    """Tell whether torch takes so many micro-batches: fewer than stages it mostly does not."""
    num_stages = len(ranks_of(schedule, num_ranks))
    return num_microbatches >= num_stages or schedule == "ScheduleZBVZeroBubble"


def names(num_ranks: int, num_microbatches: int) -> tuple[str, ...]:
    """Name what can be run, but for GPipe."""
    every = (name for name in SCHEDULES if name != "ScheduleGPipe")
    return tuple(PREFIX + name for name in every if can_run(name, num_ranks, num_microbatches))


def prepare(rank: int, work: Work, counts: tuple[int, ...]) -> dict[Key, Part]:
    """Make the schedules of every number of micro-batches."""
    dist.init_process_group("gloo")
    return {
        (name, count): _part(name.removeprefix(PREFIX), count, rank, work)
        for count in counts
        for name in names(work.num_ranks, count)
    }


def _part(schedule: str, num_microbatches: int, rank: int, work: Work) -> Part:
    ranks = ranks_of(schedule, work.num_ranks)
    mine = own_stages(work.model(), rank, ranks)
    return part(schedule, num_microbatches, mine, len(ranks), work.data(num_microbatches))
