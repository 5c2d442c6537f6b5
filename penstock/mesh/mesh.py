"""The mesh: a process for each rank of a placement, or all ranks in one process."""

import atexit
import sys
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from platform import python_version
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import ConfigError, check_count, check_kind
from penstock.launcher import end_with_launcher
from penstock.planner.checks import check_timeout
from penstock.planner.placement import REPLICA, SHARD, STAGE, Placement
from penstock.trace.units import count_text
from penstock.types import Transport

from .agreement import told_by_first
from .background import Background
from .collectives import Collectives, Waits
from .control import Control
from .lifelines import Lifelines
from .meet import join, meeting
from .point_to_point import PointToPoint
from .start import check_backends, num_processes, process_device
from .threads import end_now, in_thread, never_destroy
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
class Mesh:
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
    def speaks(self) -> bool:
        """Whether what this process tells its `stages` counts: where these have unlike meshes, the
        first shard of each speaks for all.
        """
        return self.placement.is_regular or self.shard == 0

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


def init_mesh(
    num_stages: int | None = None,
    num_replicas: int = 1,
    num_shards: int | tuple[int, ...] = 1,
    *,
    placement: Placement | None = None,
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
        num_shards: processes that share each stage of a replica; several numbers are the lengths
            of the axes along which these are arranged, the last one between neighbours.
        placement: which ranks run each stage, where stages have meshes of their own: instead of
            these three.
        timeout_s: deadline of every wait between processes, in seconds; at most a year.
        device: what this process computes on, between processes; default: the CPU.  Of a kind
            ("cuda"), each process has the device of its number on its host (LOCAL_RANK).
            Agreements go by gloo, tensors by the device's own backend.

    Raises:
        ConfigError: the number of processes is not K x D x shards, an argument or a variable of
            the environment cannot work, or the processes were given different arguments or run
            different versions of Python, torch or Penstock.
        MeshError: the processes do not find each other in time.
    """
    end_with_launcher()
    shape = num_shards if isinstance(num_shards, tuple) else (num_shards,)
    for length in shape:
        check_count("num_shards", length)
    all_shards = prod(shape)
    counts = {"num_stages": num_stages, "num_replicas": num_replicas, "num_shards": all_shards}
    _check_counts(counts, placement)
    timeout_s = check_timeout(timeout_s)
    if not dist.is_initialized() and num_processes() == 1:
        needed = num_replicas * all_shards if placement is None else placement.num_ranks
        if needed != 1:
            named = {**counts, "num_stages": None, "placement": placement}
            words = [f"{name}={x}" for name, x in named.items() if x not in (None, 1)]
            raise ConfigError(
                f"{', '.join(words)}, but this is a single process; replicas and shards are "
                "processes: start the script with torchrun --nproc-per-node "
                f"{needed * (num_stages or 1)}"
            )
        return Mesh.of_one_process(num_stages or 1, timeout_s)
    given: dict[str, Any] = {**counts, "num_shards": num_shards, "placement": placement}
    world, place = meet(given, timeout_s, device)
    if placement is None:
        size = world.size
        stages = num_stages if num_stages is not None else size // (num_replicas * all_shards)
        _check_world({**counts, "num_stages": stages}, size)
        placement = Placement.of(range(stages), num_replicas, num_shards=num_shards)
    return join_mesh(world, placement, place)


def meet(
    given: dict[str, Any], timeout_s: float, device: torch.device | str | None
) -> tuple[Control, torch.device]:
    """Meet the other processes, which must be `given` the same; return all of them, and what this
    one computes on.

    Raises:
        ConfigError, MeshError: as `init_mesh`.
    """
    backends, place = check_backends(device), process_device(device)
    if place.type != "cpu":
        torch.accelerator.set_device_index(place)
    join(timeout_s, backends)
    with meeting():
        attempt = told_by_first(uuid.uuid4().hex)
    watch = Watch.start(dist.get_rank(), dist.get_world_size(), timeout_s, attempt)
    world = Control.of_all(Background(watch, timeout_s))
    world.require_same("init_mesh", {**given, "timeout_s": timeout_s, **_facts(place)})
    return world, place


def join_mesh(world: Control, placement: Placement, place: torch.device) -> Mesh:
    """Make the mesh of processes that have met.

    Raises:
        ConfigError: the placement has another number of ranks.
    """
    if placement.num_ranks != world.size:
        raise ConfigError(
            f"the placement has {count_text(placement.num_ranks, 'rank')}, but {world.size} "
            "processes were started; start as many, or change the placement"
        )
    mesh = _joined(world, placement, place)
    atexit.register(_leave, mesh)
    return mesh


def _joined(world: Control, placement: Placement, device: torch.device) -> Mesh:
    """Make the mesh of processes that agree on it."""
    background = world.waits.background
    with world.reporting(placement.names):
        shards = _along(placement.groups(SHARD), world)
        axes: tuple[Collectives, ...] = (shards.tensors,)
        for stage in (placement.ranks.index(mesh) for mesh in placement.meshes):
            lines = placement.shard_lines(stage)
            if len(lines) > 1:  # all processes make all groups
                along = tuple(_along(line, world).tensors for line in lines)
                axes = along if world.rank in chain(*placement.ranks[stage]) else axes
        return Mesh(
            placement,
            background.timeout_s,
            device,
            world,
            stages=_along(placement.groups(STAGE), world),
            replicas=_along(placement.groups(REPLICA), world),
            shards=shards,
            shard_axes=axes,
            processes=Processes(background.watch, background, Lifelines(world)),
        )


def _along(groups: Sequence[tuple[int, ...]], world: Control) -> Control:
    """Make these groups of ranks, all of them in every process, and return this one's."""
    found = Control()
    for ranks in groups:
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks)
        if world.rank in ranks:
            own = replace(world.tensors, rank=ranks.index(world.rank), ranks=ranks, group=group)
            found = replace(world, tensors=own)
    return found


def _leave(mesh: Mesh) -> None:
    """Close the mesh when the process ends.

    A thread that still waits for a peer that failed would crash the interpreter if it woke while
    that goes down; the process then ends here, and not well.
    """
    mesh.close()
    if mesh.processes is not None and not mesh.processes.have_ended:
        end_now(1)


def _check_world(counts: dict[str, int | None], world_size: int) -> None:
    stages, replicas, shards = (counts[f"num_{name}s"] or 1 for name in (STAGE, REPLICA, SHARD))
    needed = stages * replicas * shards
    if needed != world_size:
        words = [count_text(stages, "stage"), count_text(replicas, "replica")]
        words += [count_text(shards, "shard")] if shards > 1 else []
        raise ConfigError(
            f"{' x '.join(words)} are {count_text(needed, 'process')}, but {world_size} were "
            f"started; start {needed} (torchrun --nnodes N --nproc-per-node P with N x P as "
            "many), or change num_stages or num_replicas"
        )


def _check_counts(counts: dict[str, int | None], placement: Placement | None) -> None:
    for name, value in counts.items():
        if value is not None:
            check_count(name, value)
    check_kind("placement", placement, (Placement, type(None)), "a penstock Placement, or None")
    if placement is not None and set(counts.values()) - {None, 1}:
        given = [f"{name}={value}" for name, value in counts.items() if value not in (None, 1)]
        raise ConfigError(
            f"placement= says who runs what, and {', '.join(given)} is given too; leave one out"
        )


def _facts(place: torch.device) -> dict[str, Any]:
    return {
        "kind of device": place.type,
        "version of torch": torch.__version__,
        "version of Penstock": _version(),
        "version of Python": python_version(),
    }


def _version() -> str:
    version: str = sys.modules[__name__.partition(".")[0]].__version__
    return version
