"""The mesh: a process for each rank of a placement, or all ranks in one process."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from penstock.planner.placement import STAGE, Placement
from penstock.trace.units import count_text
from penstock.types import Transport

from .background import Background
from .collectives import Collectives, Shared, Waits
from .control import Control
from .lifelines import Lifelines
from .point_to_point import PointToPoint
from .threads import in_thread, never_destroy
from .watch import Watch

DEFAULT_TIMEOUT_S = 600.0
_CPU, _NOBODY_ELSE = torch.device("cpu"), Control()


@dataclass(slots=True, eq=False)
class Processes:
    """What holds the processes of a mesh together; `point_to_point` is made when it is wanted."""

    watch: Watch
    background: Background
    lifelines: Lifelines
    point_to_point: PointToPoint | None = None

    @property
    def have_ended(self) -> bool:
        """Whether no thread of these still waits, for a peer that failed."""
        return self.background.has_ended and self.watch.has_ended


@dataclass(frozen=True, slots=True, eq=False)
class Mesh(Shared):
    """Who runs which stage of which replica.

    `placement` says where each place along the stages is.  Where a schedule runs several stages
    on each rank, `num_stages` counts ranks.  `world` are all processes that take part, `stages`
    those of this replica and shard, `replicas` those that run the same stages on other samples,
    `shards` those that share this one's stages, arranged along `shard_axes`; where all stages run
    in this process, in threads, it is alone in each, and there are no `processes`.
    """

    placement: Placement
    timeout_s: float = DEFAULT_TIMEOUT_S
    device: torch.device = _CPU
    world: Control = _NOBODY_ELSE
    stages: Control = _NOBODY_ELSE
    replicas: Control = _NOBODY_ELSE
    shards: Control = _NOBODY_ELSE
    shard_axes: tuple[Collectives, ...] = (Collectives(),)
    processes: Processes | None = None

    @classmethod
    def of_one_process(cls, num_stages: int = 1, timeout_s: float = DEFAULT_TIMEOUT_S) -> "Mesh":
        """Return the mesh of a process that runs all stages."""
        return cls(Placement.of(range(num_stages)), timeout_s)

    @property
    def own_device(self) -> torch.device | None:
        """What all stages of this process compute on; None where the plan says so for each, since
        all of them are here.
        """
        return None if self.processes is None else self.device

    @property
    def transports(self) -> tuple[Transport, ...]:
        """What can carry values between its stages, the usual one first."""
        are_several = self.processes is not None
        return tuple(t for t in Transport if t.is_between_processes == are_several)

    @property
    def num_stages(self) -> int:
        """K: ranks of a replica, or the meshes that share a stage each."""
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
        return self.placement.place_of(self.rank) if self.processes else 0

    @property
    def replica(self) -> int:
        """The replica of the pipeline that this process belongs to."""
        return self.replicas.rank

    @property
    def shard(self) -> int:
        """Which of the processes that share its stages this one is."""
        return self.shards.rank

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this process is the first of those that run its stages: it writes what is whole
        on several of them.
        """
        return self.replica == 0 and self.shard == 0

    @property
    def speaks(self) -> bool:
        """Whether what this process tells its `stages` counts: where these have unlike meshes, the
        first shard of each speaks for all; one without a stage has nothing to tell.
        """
        is_first = self.shard == 0 and self.rank not in self.placement.idle
        return self.placement.is_regular or is_first

    def speaker_of(self, place: int) -> int:
        """Return the number among `stages` of who speaks for a place along them."""
        if self.stages.size == 1:
            return 0
        shard = self.shard if self.placement.is_regular else 0
        rank = self.placement.meshes[place][self.replica][shard]
        return self.stages.tensors.ranks.index(rank)

    @property
    def is_first_rank(self) -> bool:
        """Whether this process is the one that logs and saves."""
        return self.rank == 0

    def processes_of(self, placement: Placement) -> Placement:
        """Say which process runs each stage; one that is alone runs those of all ranks."""
        return placement if self.processes else Placement.of([0] * placement.num_stages)

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
            groups = self.placement.groups(STAGE)
            wires = PointToPoint(groups, self.rank, processes.background, self.device)
            processes.point_to_point = wires
        return processes.point_to_point

    @property
    def _processes(self) -> Processes:
        assert self.processes is not None, "there is one process only"
        return self.processes

    def begin_save(self, job: Callable[[Control], None], what: str) -> Callable[[], None]:
        """Run a job beside the training, one after the other, in every process alike; the process
        does not end before it has.

        The job is given the group of all processes to speak over, which is not the training's.

        Returns:
            What waits for its end; each wait within the job has the deadline.
        """
        if self.processes is None:
            return in_thread(lambda: job(self.world), "penstock-save", daemon=False).result
        return self.background.begin_save(partial(job, self._saves()), what)

    def _saves(self) -> Control:
        background, world = self.background, self.world
        waits = Waits(background=background, controls=background.saves_controls, blames=False)
        tensors = replace(world.tensors, waits=waits, group=background.saving_group())
        return replace(world, tensors=tensors, long=background.saves_long)

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
        where = "all in this process"
        if self.processes:
            where = f"rank {self.rank} of {self.world_size}: {self.placement.name_of(self.rank)}"
        meshes = (f"{len(mesh)} x {len(mesh[0])}" for mesh in self.placement.meshes)
        each = ", ".join(dict.fromkeys(meshes))
        return f"Mesh({count_text(self.num_stages, 'stage')} of {each}, {where})"
