"""The mesh: K stages by D replicas, one process for each place, or all in one process.

    rank = replica * K + stage            replica 0:   0 ──► 1 ──► 2
                                          replica 1:   3 ──► 4 ──► 5

Stages that talk to each other are neighbours in rank, and so mostly on one host.
"""

import atexit
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from platform import python_version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.errors import ConfigError, check_count
from penstock.planner.checks import check_timeout

from .agreement import (
    CALLS,
    ROW_WIDTH,
    check_same_kind,
    require_same,
)
from .background import Background
from .collectives import Collectives
from .lifelines import Lifelines
from .meet import join, meeting, told_by_first
from .start import num_processes
from .streams import Streams
from .threads import end_now
from .watch import Watch

REPLICA, STAGE = "replica", "stage"
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """Who runs which stage of which replica.

    `stage` and `replica` are this process's place.  Where a schedule runs several stages on each
    rank, `num_stages` counts ranks, and `stage` is the first of this one's.  `device_mesh` has the
    axes `replica` and `stage`; it is None where all stages run in this process, in threads.
    `pipelines` describes those made on the mesh of processes, in the order of their numbers.
    """

    num_stages: int
    num_replicas: int
    timeout_s: float
    rank: int = 0
    device: torch.device | None = None
    device_mesh: DeviceMesh | None = None
    watch: Watch | None = None
    background: Background | None = None
    collectives: Collectives | None = None
    streams: Streams | None = None
    lifelines: Lifelines | None = None
    pipelines: list[str] = field(default_factory=list)

    @property
    def is_distributed(self) -> bool:
        """Whether the stages are in several processes."""
        return self.device_mesh is not None

    @property
    def world_size(self) -> int:
        """Processes that take part."""
        return self.num_stages * self.num_replicas if self.is_distributed else 1

    @property
    def stage(self) -> int:
        """The stage that this process runs, or the first of several; 0 where it runs all."""
        return self.rank % self.num_stages if self.is_distributed else 0

    @property
    def replica(self) -> int:
        """The replica of the pipeline that this process belongs to."""
        return self.rank // self.num_stages if self.is_distributed else 0

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the one that logs and saves."""
        return self.rank == 0

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell all processes of whatever is raised inside, so that none waits for this one."""
        with self.watch.reporting() if self.watch is not None else nullcontext():
            yield

    def rank_of(self, place: int) -> int:
        """Give the rank at `place` along the stages of this process's replica."""
        return self.replica * self.num_stages + place

    def name_stages(self, places: Sequence[int]) -> None:
        """Name the processes by the stages they run, in messages; `places[stage]` says who."""
        if self.watch is not None:
            self.watch.name_ranks(_names(places, self.num_replicas))

    def group(self, axis: str) -> Any:
        """Give the process group of this process along `axis`."""
        assert self.device_mesh is not None
        return self.device_mesh.get_group(axis)

    def number_pipeline(self, what: str) -> int:
        """Number a pipeline that all processes have made alike; `what` describes it in messages.

        Calls name it by this number, so that those for one pipeline never meet those for another.
        """
        self.pipelines.append(f"pipeline {len(self.pipelines)} ({what})")
        return len(self.pipelines) - 1

    def exchange(self, kind: str, pipeline: int, row: Sequence[float]) -> list[list[float]]:
        """Begin a call together with all processes, and compare what it is and for which pipeline.

        Returns:
            The rows of all processes, in the order of ranks.

        Raises:
            MeshError: they begin different kinds of calls, or for different pipelines.
        """
        if self.background is None:
            return [list(row)]
        full = [float(CALLS.index(kind)), float(pipeline), *row]
        sent = torch.tensor(full + [0.0] * (ROW_WIDTH - len(full)), dtype=torch.float64)
        rows = [torch.empty_like(sent) for _ in range(self.world_size)]
        self.background.run(
            lambda: dist.all_gather(rows, sent), "for the others to begin the same call"
        )
        numbers = [found.tolist() for found in rows]
        check_same_kind(numbers, self.pipelines)
        return [found[2 : 2 + len(row)] for found in numbers]

    def begin_call(self, kind: str, pipeline: int) -> None:
        """Compare that all processes make a call of this kind, one of `agreement.CALLS`.

        Raises:
            MeshError: they do not.
        """
        with self.reporting():
            self.exchange(kind, pipeline, ())

    def gather(self, value: Any, what: str) -> list[Any]:
        """Return the values of all processes, in the order of ranks; only the own one where it is
        alone.  All processes call this alike; `what` completes "rank 1 (stage 1) waited ...".
        """
        return [value] if self.collectives is None else self.collectives.gather(value, what)

    def work(self, job: Callable[[], Any], what: str) -> Any:
        """Run a job in every process that may take long, and return when all have ended theirs;
        see `Collectives.work`.
        """
        return job() if self.collectives is None else self.collectives.work(job, what)

    def highest(self, value: int, what: str) -> int:
        """Return the highest of all processes' values; a cheaper `gather`."""
        return value if self.collectives is None else self.collectives.highest(value, what)

    def from_first(self, job: Callable[[], Any], what: str) -> Any:
        """Run a job that may take long on rank 0 only; return its result on all processes, or
        raise its error on all.

        Raises:
            PenstockError: what `job` raised.
        """
        return job() if self.collectives is None else self.collectives.from_first(job, what)

    def close(self) -> None:
        """Leave the mesh: end its threads and process groups; also done when the process ends."""
        if self.background is None or self.watch is None:
            return
        self.background.end_saves()
        if self.lifelines is not None:
            self.lifelines.close()
        self.background.close()
        self.watch.close()
        if self.is_clean and self.streams is not None:
            self.streams.close()
        if self.is_clean and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def is_clean(self) -> bool:
        """Whether, once closed, none of its threads still waits for a peer that failed."""
        threads = (self.background, self.watch)
        return all(thread is None or thread.has_ended for thread in threads)

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.world_size}: stage {self.stage}"
        if self.num_replicas > 1:
            place += f" of replica {self.replica}"
        where = place if self.is_distributed else "all in this process"
        return f"Mesh({self.num_stages} stages x {self.num_replicas} replicas, {where})"


def init_mesh(
    num_stages: int | None = None,
    num_replicas: int = 1,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: torch.device | str | None = None,
) -> Mesh:
    """Find out who takes part, and give this process its place.

    Under torchrun (or wherever RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set) each process
    runs one stage of one replica, on the CPU so far (gloo).  Without, this process runs all
    stages, each in a thread.

    Args:
        num_stages: K, processes of a replica, each with a stage, or with several if the schedule
            says so; default: as many as processes divided by `num_replicas`, or 1 without
            torchrun.
        num_replicas: D, copies of the pipeline that share each mini-batch's samples.
        timeout_s: deadline of every wait between processes, in seconds; at most a year.
        device: what this process computes on; between processes only the CPU so far.

    Raises:
        ConfigError: the number of processes is not K x D, an argument or a variable of the
            environment cannot work, or the processes were given different arguments or run
            different versions of Python, torch or Penstock.
        MeshError: the processes do not find each other in time.
    """
    _check_counts(num_stages, num_replicas)
    timeout_s = check_timeout(timeout_s)
    if not dist.is_initialized() and num_processes() == 1:
        if num_replicas != 1:
            raise ConfigError(
                f"num_replicas={num_replicas}, but this is a single process; replicas are "
                "processes: start the script with torchrun --nproc-per-node "
                f"{num_replicas * (num_stages or 1)}"
            )
        return Mesh(num_stages or 1, 1, timeout_s)
    place = torch.device(device or "cpu")
    if place.type != "cpu":
        raise ConfigError(
            f"device={str(place)!r}: stages in several processes run on CPUs so far; for GPUs of "
            "one host use one process (no torchrun), where each stage has a thread"
        )
    join(timeout_s)
    world_size = dist.get_world_size()
    with meeting():
        attempt = told_by_first(uuid.uuid4().hex)
    watch = Watch.start(dist.get_rank(), world_size, timeout_s, attempt)
    with meeting():
        _agree(place, num_stages, num_replicas, timeout_s)
    stages = num_stages if num_stages is not None else world_size // num_replicas
    _check_world(stages, num_replicas, world_size)
    device_mesh = init_device_mesh(
        place.type, (num_replicas, stages), mesh_dim_names=(REPLICA, STAGE)
    )
    watch.name_ranks(_names(range(stages), num_replicas))
    background = Background(watch, timeout_s)
    streams = Streams(dist.get_rank(), background)
    mesh = Mesh(
        stages,
        num_replicas,
        timeout_s,
        rank=dist.get_rank(),
        device=place,
        device_mesh=device_mesh,
        watch=watch,
        background=background,
        collectives=Collectives(background, background.controls, background.long),
        streams=streams,
        lifelines=Lifelines(streams, background, world_size),
    )
    atexit.register(_leave, mesh)
    return mesh


def _leave(mesh: Mesh) -> None:
    """Close the mesh when the process ends.

    A thread that still waits for a peer that failed would crash the interpreter if it woke while
    that goes down; the process then ends here, and not well.
    """
    mesh.close()
    if not mesh.is_clean:
        end_now(1)


def _names(places: Sequence[int], num_replicas: int) -> list[str]:
    """Say of each rank which stages it runs, for messages."""
    of_place = [
        [str(stage) for stage, place in enumerate(places) if place == wanted]
        for wanted in range(1 + max(places))
    ]
    of_replica = [f" of replica {r}" if num_replicas > 1 else "" for r in range(num_replicas)]
    return [
        f"stage{'s' if len(stages) > 1 else ''} {' and '.join(stages)}{which}"
        for which in of_replica
        for stages in of_place
    ]


def _check_world(num_stages: int, num_replicas: int, world_size: int) -> None:
    needed = num_stages * num_replicas
    if needed != world_size:
        raise ConfigError(
            f"{num_stages} stages x {num_replicas} replicas are {needed} processes, but "
            f"{world_size} were started; start {needed} (torchrun --nnodes N --nproc-per-node P "
            "with N x P as many), or change num_stages or num_replicas"
        )


def _check_counts(num_stages: int | None, num_replicas: int) -> None:
    for name, value in (("num_stages", num_stages), ("num_replicas", num_replicas)):
        if value is not None:
            check_count(name, value)


def _agree(
    place: torch.device, num_stages: int | None, num_replicas: int, timeout_s: float
) -> None:
    require_same(
        "init_mesh",
        {
            "num_stages": num_stages,
            "num_replicas": num_replicas,
            "timeout_s": timeout_s,
            "kind of device": place.type,
            "version of torch": torch.__version__,
            "version of Penstock": _version(),
            "version of Python": python_version(),
        },
    )


def _version() -> str:
    version: str = sys.modules[__name__.partition(".")[0]].__version__
    return version
