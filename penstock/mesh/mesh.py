"""The mesh: K stages by D replicas, one process for each place, or all in one process."""

import atexit
import sys
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from platform import python_version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.errors import ConfigError, check_count
from penstock.launcher import end_with_launcher
from penstock.planner.checks import check_timeout
from penstock.planner.placement import REPLICA, STAGE, Placement
from penstock.trace.units import count_text

from .backends import check_backends, process_device
from .background import Background
from .group import AbstractGroup, Alone
from .lifelines import Lifelines
from .meet import join, meeting
from .point_to_point import PointToPoint
from .process_group import ProcessGroup, told_by_first
from .start import num_processes
from .threads import end_now, in_thread, never_destroy
from .watch import Watch

DEFAULT_TIMEOUT_S = 600.0
_CPU, _NOBODY_ELSE = torch.device("cpu"), Alone()


@dataclass(slots=True, eq=False)
class Processes:
    """What holds the processes of a mesh together; `point_to_point` is made when it is wanted."""

    device_mesh: DeviceMesh
    watch: Watch
    background: Background
    lifelines: Lifelines
    point_to_point: PointToPoint | None = None

    @property
    def have_ended(self) -> bool:
        """Whether no thread of these still waits, for a peer that failed."""
        return self.background.has_ended and self.watch.has_ended


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """Who runs which stage of which replica.

    `placement` says where each place along the stages is.  Where a schedule runs several stages
    on each rank, `num_stages` counts ranks.  `world` are all processes that take part, `stages`
    those of this replica, `replicas` those that run the same stages; where all stages run in this
    process, in threads, it is alone in each, and there are no `processes`.
    """

    placement: Placement
    timeout_s: float = DEFAULT_TIMEOUT_S
    device: torch.device = _CPU
    world: AbstractGroup = _NOBODY_ELSE
    stages: AbstractGroup = _NOBODY_ELSE
    replicas: AbstractGroup = _NOBODY_ELSE
    processes: Processes | None = None

    @classmethod
    def of_one_process(cls, num_stages: int = 1, timeout_s: float = DEFAULT_TIMEOUT_S) -> "Mesh":
        """Return the mesh of a process that runs all stages."""
        return cls(Placement.of(range(num_stages)), timeout_s)

    @property
    def is_distributed(self) -> bool:
        """Whether the stages are in several processes."""
        return self.processes is not None

    @property
    def num_stages(self) -> int:
        """K: ranks of a replica."""
        return self.placement.num_stages

    @property
    def num_replicas(self) -> int:
        """D."""
        return self.placement.num_replicas

    @property
    def world_size(self) -> int:
        """Processes that take part."""
        return self.world.size

    @property
    def rank(self) -> int:
        """This process's number among them."""
        return self.world.rank

    @property
    def stage(self) -> int:
        """The stage that this process runs, or the first of several; 0 where it runs all."""
        return self.stages.rank

    @property
    def replica(self) -> int:
        """The replica of the pipeline that this process belongs to."""
        return self.replicas.rank

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the one that logs and saves."""
        return self.rank == 0

    def processes_of(self, placement: Placement) -> Placement:
        """Say which process runs each stage; one that is alone runs those of all ranks."""
        return placement if self.is_distributed else Placement.of([0] * placement.num_stages)

    def reporting(self) -> AbstractContextManager[None]:
        """Tell all processes of whatever is raised inside, so that none waits for this one."""
        return self.world.reporting()

    @property
    def background(self) -> Background:
        """The threads that wait for other processes, where there are any."""
        return self._processes.background

    @property
    def point_to_point(self) -> PointToPoint:
        """Torch's sends and receives in this replica; all its processes ask for it alike."""
        processes = self._processes
        if processes.point_to_point is None:
            ranks = self.placement.peers(self.rank, STAGE)
            wires = PointToPoint(ranks, self.rank, processes.background, self.device)
            processes.point_to_point = wires
        return processes.point_to_point

    @property
    def device_mesh(self) -> DeviceMesh:
        """Torch's mesh of the processes, with the axes `replica` and `stage`."""
        return self._processes.device_mesh

    @property
    def _processes(self) -> Processes:
        assert self.processes is not None, "there is one process only"
        return self.processes

    def begin_save(self, job: Callable[[AbstractGroup], None], what: str) -> Callable[[], None]:
        """Run a job beside the training, one after the other, in every process alike; the process
        does not end before it has.

        The job is given the group of all processes to speak over, which is not the training's.

        Returns:
            What waits for its end; each wait within the job has the deadline.
        """
        if self.processes is None:
            return in_thread(lambda: job(self.world), "penstock-save", daemon=False).result
        return self.background.begin_save(partial(job, self._saves()), what)

    def _saves(self) -> AbstractGroup:
        background, world = self.background, self.world
        assert isinstance(world, ProcessGroup)
        return replace(
            world,
            controls=background.saves_controls,
            long=background.saves_long,
            group=background.saving_group(),
            blames=False,
        )

    def close(self) -> None:
        """Leave the mesh: end its threads and process groups; also done when the process ends."""
        if (processes := self.processes) is None:
            return
        processes.background.end_saves()
        processes.lifelines.close()
        processes.background.close()
        processes.watch.close()
        if processes.watch.knows_failure:  # torch may wait for ever for a peer that is gone
            never_destroy(self, processes.point_to_point, dist.group.WORLD)
        if processes.have_ended:
            processes.point_to_point = None
            if dist.is_initialized():
                dist.destroy_process_group()

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        place = f"rank {self.rank} of {self.world_size}: stage {self.stage}"
        if self.num_replicas > 1:
            place += f" of replica {self.replica}"
        where = place if self.is_distributed else "all in this process"
        stages = count_text(self.num_stages, "stage")
        return f"Mesh({stages} x {count_text(self.num_replicas, 'replica')}, {where})"


def init_mesh(
    num_stages: int | None = None,
    num_replicas: int = 1,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: torch.device | str | None = None,
) -> Mesh:
    """Find out who takes part, and give this process its place.

    Under torchrun (or wherever RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set) each process
    runs one stage of one replica.  Without, this process runs all stages, each in a thread.

    Args:
        num_stages: K, processes of a replica, each with a stage, or with several if the schedule
            says so; default: as many as processes divided by `num_replicas`, or 1 without
            torchrun.
        num_replicas: D, copies of the pipeline that share each mini-batch's samples.
        timeout_s: deadline of every wait between processes, in seconds; at most a year.
        device: what this process computes on, between processes; default: the CPU.  Of a kind
            ("cuda"), each process has the device of its number on its host (LOCAL_RANK).
            Agreements go by gloo, tensors by the device's own backend.

    Raises:
        ConfigError: the number of processes is not K x D, an argument or a variable of the
            environment cannot work, or the processes were given different arguments or run
            different versions of Python, torch or Penstock.
        MeshError: the processes do not find each other in time.
    """
    end_with_launcher()
    _check_counts(num_stages, num_replicas)
    timeout_s = check_timeout(timeout_s)
    if not dist.is_initialized() and num_processes() == 1:
        if num_replicas != 1:
            raise ConfigError(
                f"num_replicas={num_replicas}, but this is a single process; replicas are "
                "processes: start the script with torchrun --nproc-per-node "
                f"{num_replicas * (num_stages or 1)}"
            )
        return Mesh.of_one_process(num_stages or 1, timeout_s)
    backends, place = check_backends(device), process_device(device)
    if place.type != "cpu":
        torch.accelerator.set_device_index(place)
    join(timeout_s, backends)
    with meeting():
        attempt = told_by_first(uuid.uuid4().hex)
    rank, size = dist.get_rank(), dist.get_world_size()
    watch = Watch.start(rank, size, timeout_s, attempt)
    world = ProcessGroup.of_all(Background(watch, timeout_s))
    world.require_same("init_mesh", _facts(place, num_stages, num_replicas, timeout_s))
    stages = num_stages if num_stages is not None else size // num_replicas
    _check_world(stages, num_replicas, size)
    mesh = _joined(world, Placement.of(range(stages), num_replicas), place)
    atexit.register(_leave, mesh)
    return mesh


def _joined(world: ProcessGroup, placement: Placement, device: torch.device) -> Mesh:
    """Make the mesh of processes that agree on it."""
    background, rank = world.background, world.rank
    with world.reporting(placement.names):
        shape = (placement.num_replicas, placement.num_stages)
        device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=(REPLICA, STAGE))
        processes = Processes(device_mesh, background.watch, background, Lifelines(world))
    along = {}
    for axis in (STAGE, REPLICA):
        ranks = placement.peers(rank, axis)
        along[axis] = (
            replace(world, rank=ranks.index(rank), ranks=ranks, group=device_mesh.get_group(axis))
            if len(ranks) > 1
            else Alone()
        )
    return Mesh(
        placement,
        background.timeout_s,
        device,
        world,
        along[STAGE],
        along[REPLICA],
        processes,
    )


def _leave(mesh: Mesh) -> None:
    """Close the mesh when the process ends.

    A thread that still waits for a peer that failed would crash the interpreter if it woke while
    that goes down; the process then ends here, and not well.
    """
    mesh.close()
    if mesh.processes is not None and not mesh.processes.have_ended:
        end_now(1)


def _check_world(num_stages: int, num_replicas: int, world_size: int) -> None:
    needed = num_stages * num_replicas
    if needed != world_size:
        raise ConfigError(
            f"{count_text(num_stages, 'stage')} x {count_text(num_replicas, 'replica')} are "
            f"{count_text(needed, 'process')}, but {world_size} were started; start {needed} "
            "(torchrun --nnodes N --nproc-per-node P with N x P as many), or change num_stages or "
            "num_replicas"
        )


def _check_counts(num_stages: int | None, num_replicas: int) -> None:
    for name, value in (("num_stages", num_stages), ("num_replicas", num_replicas)):
        if value is not None:
            check_count(name, value)


def _facts(
    place: torch.device, num_stages: int | None, num_replicas: int, timeout_s: float
) -> dict[str, Any]:
    return {
        "num_stages": num_stages,
        "num_replicas": num_replicas,
        "timeout_s": timeout_s,
        "kind of device": place.type,
        "version of torch": torch.__version__,
        "version of Penstock": _version(),
        "version of Python": python_version(),
    }


def _version() -> str:
    version: str = sys.modules[__name__.partition(".")[0]].__version__
    return version
