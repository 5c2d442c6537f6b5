"""The mesh: a process for each rank of a placement, or all ranks in one process."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from penstock.planner.placement import STAGE, Placement
from penstock.trace.units import count_text
from penstock.types import Transport

from .background import Background
from .collectives import Collectives, Shared, Waits, reached
from .control import Control
from .lifelines import Lifelines
from .point_to_point import PointToPoint
from .threads import in_thread, never_destroy
from .watch import Watch

DEFAULT_TIMEOUT_S = 600.0
"""Seconds that a wait between processes may last, by default."""
_CPU = torch.device("cpu")
"""The device of a process by default."""
_ALONE = Control()
"""The control of an axis with one process."""


class HoldsGraphs(Protocol):
    """The interface of drivers that hold CUDA graphs with messages inside."""

    def close(self) -> None:
        """Let go of them."""


@dataclass(slots=True, eq=False)
class Processes:
    """The threads and connections of a process; its first use makes `point_to_point`."""

    watch: Watch
    background: Background
    lifelines: Lifelines
    point_to_point: PointToPoint | None = None
    holders: "WeakSet[HoldsGraphs]" = field(default_factory=WeakSet)
    """All that holds CUDA graphs: NCCL may wait for ever for the end of a graph that uses it."""

    @property
    def have_ended(self) -> bool:
        """True if no thread still waits for a failed peer."""
        return self.background.has_ended and self.watch.has_ended


@dataclass(frozen=True, slots=True, eq=False)
class Mesh(Shared):
    """The processes of a placement, and this one's place among them.

    `placement` maps stages to ranks; `num_stages` counts ranks if each runs several stages.
    `world` has all processes, `stages` those of this replica and shard.  `replicas` has those with
    the same stages and other samples, `shards` those that share these stages.  `shard_axes` are
    the axes along which the shards are arranged, and `sum_axes` the same with other process groups
    for sums of gradients, which run beside all else.  With all stages in threads of one process,
    each has that process alone, and `processes` is None.
    """

    placement: Placement
    timeout_s: float = DEFAULT_TIMEOUT_S
    device: torch.device = _CPU
    world: Control = _ALONE
    stages: Control = _ALONE
    replicas: Control = _ALONE
    shards: Control = _ALONE
    shard_axes: tuple[Collectives, ...] = (Collectives(),)
    sum_axes: tuple[Collectives, ...] = (Collectives(),)
    processes: Processes | None = None

    @classmethod
    def of_one_process(cls, num_stages: int = 1, timeout_s: float = DEFAULT_TIMEOUT_S) -> "Mesh":
        """Return the mesh of a process that runs all stages."""
        return cls(Placement.of(range(num_stages)), timeout_s)

    @property
    def own_device(self) -> torch.device | None:
        """This process's device; None for a single process, where stages have their own."""
        return None if self.processes is None else self.device

    @property
    def transports(self) -> tuple[Transport, ...]:
        """The transports that work between these stages, the default first."""
        are_several = self.processes is not None
        return tuple(t for t in Transport if t.is_between_processes == are_several)

    @property
    def num_stages(self) -> int:
        """K, the number of ranks of a replica, or of meshes that share a stage each."""
        return self.placement.num_stages

    @property
    def num_replicas(self) -> int:
        """D, the number of replicas."""
        return self.placement.num_replicas

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.world.size

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return self.world.rank

    @property
    def stage(self) -> int:
        """The first stage of this process; 0 if it runs all."""
        return self.placement.place_of(self.rank) if self.processes else 0

    @property
    def replica(self) -> int:
        """The replica of this process."""
        return self.replicas.rank

    @property
    def shard(self) -> int:
        """This process's number among those that share its stages."""
        return self.shards.rank

    @property
    def is_first_of_stage(self) -> bool:
        """True for the process that writes tensors of which several processes hold all."""
        return self.replica == 0 and self.shard == 0

    @property
    def speaks(self) -> bool:
        """True if the values that this process tells its `stages` count.

        If stages have unlike meshes, the first shard of each speaks for all.  A process without a
        stage never speaks.
        """
        is_first = self.shard == 0 and self.rank not in self.placement.idle
        return self.placement.is_regular or is_first

    def speaker_of(self, place: int) -> int:
        """Return the number, among `stages`, of the process that speaks for a place along them."""
        if self.stages.size == 1:
            return 0
        shard = self.shard if self.placement.is_regular else 0
        rank = self.placement.meshes[place][self.replica][shard]
        return self.stages.tensors.ranks.index(rank)

    @property
    def is_first_rank(self) -> bool:
        """True for the process that logs and saves."""
        return self.rank == 0

    def processes_of(self, placement: Placement) -> Placement:
        """Return the process of each stage: with one process, the same for all."""
        return placement if self.processes else Placement.of([0] * placement.num_stages)

    def reporting(self) -> AbstractContextManager[None]:
        """Tell all processes of any error raised inside, so that none waits for this one."""
        return self.world.reporting()

    @property
    def background(self) -> Background:
        """The threads that wait for other processes, if there are any."""
        return self._processes.background

    @property
    def point_to_point(self) -> PointToPoint:
        """Sends and receives in this replica; all its processes ask for them together."""
        processes = self._processes
        if processes.point_to_point is None:
            groups = self.placement.groups(STAGE)
            wires = PointToPoint(groups, self.rank, processes.background, self.device)
            processes.point_to_point = wires
        return processes.point_to_point

    def wait_for_device(self, purpose: str) -> None:
        """Wait until this process's accelerator has done and sent all so far; on a CPU it has.

        Its current stream counts, and what that stream waits for.

        Raises:
            PeerError: another process failed, or is gone.
            WaitTimeout: the device does not come to it within the deadline.
        """
        if self.processes is None or self.device.type == "cpu":
            return
        if self.processes.point_to_point is not None:
            self.processes.point_to_point.join_sends()
        self.background.run(reached(self.device), purpose)

    @property
    def _processes(self) -> Processes:
        assert self.processes is not None, "there is one process only"
        return self.processes

    def begin_save(self, job: Callable[[Control], None], purpose: str) -> Callable[[], None]:
        """Run a job in a thread beside the training, in every process alike, after earlier ones.

        The process does not end before the job.  Its argument is a control of all processes over
        another process group than the training's.

        Returns:
            A function that waits for its end.  Each wait inside the job has the deadline.
        """
        if self.processes is None:
            return in_thread(lambda: job(self.world), "penstock-save", daemon=False).result
        background = self.background
        waits = Waits(background=background, controls=background.saves_controls, blames=False)
        group = background.saving_group()
        tensors = replace(self.world.tensors, waits=waits, group=group)
        world = replace(self.world, tensors=tensors, long=background.saves_long)
        slot = background.saves.submit(partial(job, world))  # behind earlier ones
        return lambda: background.wait(slot, purpose, has_deadline=False)

    def close(self) -> None:
        """End the threads and process groups of the mesh; the end of the process does the same."""
        if (processes := self.processes) is None:
            return
        for holder in tuple(processes.holders):
            holder.close()
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
        sizes = ", ".join(dict.fromkeys(meshes))
        return f"Mesh({count_text(self.num_stages, 'stage')} of {sizes}, {where})"
