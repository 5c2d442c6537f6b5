"""Make the mesh: rendezvous, agreement on the arguments, and process groups along each axis."""

import atexit
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
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

from .agreement import told_by_first
from .background import Background
from .collectives import Collectives, patient
from .control import Control
from .lifelines import Lifelines
from .meet import join, meeting
from .mesh import DEFAULT_TIMEOUT_S, Mesh, Processes
from .start import check_backends, device_by_default, num_processes, process_device
from .threads import end_now
from .watch import Watch


def init_mesh(
    num_stages: int | None = None,
    num_replicas: int = 1,
    num_shards: int | tuple[int, ...] = 1,
    *,
    placement: Placement | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: torch.device | str | None = None,
) -> Mesh:
    """Meet the other processes, and give this one its place in a mesh.

    Under torchrun (or wherever RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set) each process
    runs one stage of one replica.  Otherwise this process runs all stages, each in a thread.

    Args:
        num_stages: K, processes of a replica, each with a stage, or with several if the schedule
            says so; default: the number of processes divided by `num_replicas`, or 1 without
            torchrun.
        num_replicas: D, copies of the pipeline that share each mini-batch's samples.
        num_shards: processes that share each stage of a replica; several numbers are the lengths
            of axes, the last one between neighbours.
        placement: the ranks of each stage, for stages with different meshes: instead of these
            three.
        timeout_s: deadline of every wait between processes, in seconds; at most a year.
        device: device of this process, if there are several.  With a kind ("cuda"), each process
            has the device of its number on its host (LOCAL_RANK).  Default: the kind of the host's
            accelerators, else the CPU.  Agreements go by gloo, tensors by the device's own
            backend.

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
    # 1. A single process, without torchrun: all stages are threads of it.
    if not dist.is_initialized() and num_processes() == 1:
        needed = num_replicas * all_shards if placement is None else placement.num_ranks
        if needed != 1:
            named = {**counts, "num_stages": None, "placement": placement}
            texts = [f"{name}={x}" for name, x in named.items() if x not in (None, 1)]
            raise ConfigError(
                f"{', '.join(texts)}, but this is a single process; replicas and shards are "
                "processes: start the script with torchrun --nproc-per-node "
                f"{needed * (num_stages or 1)}"
            )
        return Mesh.of_one_process(num_stages or 1, timeout_s)
    # 2. Several processes: they meet, and the default placement uses all of them.
    arguments: dict[str, Any] = {**counts, "num_shards": num_shards, "placement": placement}
    world, place = meet(arguments, timeout_s, device)
    if placement is None:
        size = world.size
        stages = num_stages if num_stages is not None else size // (num_replicas * all_shards)
        if (needed := (stages or 1) * num_replicas * all_shards) != size:
            texts = [count_text(stages or 1, "stage"), count_text(num_replicas, "replica")]
            texts += [count_text(all_shards, "shard")] if all_shards > 1 else []
            raise ConfigError(
                f"{' x '.join(texts)} are {count_text(needed, 'process')}, but {size} were "
                f"started; start {needed} (torchrun --nnodes N --nproc-per-node P with N x P as "
                "many), or change num_stages or num_replicas"
            )
        placement = Placement.of(range(stages), num_replicas, num_shards=num_shards)
    return join_mesh(world, placement, place)


def meet(
    arguments: dict[str, Any], timeout_s: float, device: torch.device | str | None
) -> tuple[Control, torch.device]:
    """Return the control of all processes, which must have equal `arguments`, and the device here.

    Raise as `init_mesh` does.
    """
    place = _joined(timeout_s, device)
    # The watch comes first: it names the culprit if a later call fails.
    with meeting():
        attempt = told_by_first(uuid.uuid4().hex)
    watch = Watch.start(dist.get_rank(), dist.get_world_size(), timeout_s, attempt)
    world = Control.of_all(Background(watch, timeout_s))
    facts = {
        "timeout_s": timeout_s,
        "kind of device": place.type,
        "version of torch": torch.__version__,
        "version of Penstock": sys.modules[__name__.partition(".")[0]].__version__,
        "version of Python": python_version(),
    }
    world.require_same("init_mesh", {**arguments, **facts})
    return world, place


def from_rank_0(
    value: Any, timeout_s: float = DEFAULT_TIMEOUT_S, device: torch.device | str | None = None
) -> Any:
    """Return rank 0's `value` on every process, before there is a mesh; raise as `init_mesh`."""
    if num_processes() == 1:
        return value
    _joined(timeout_s, device)
    with meeting():
        return told_by_first(value)


def _joined(timeout_s: float, device: torch.device | str | None) -> torch.device:
    """Join the other processes; return this one's device, which becomes torch's current one."""
    device = device_by_default() if device is None else device
    backends, place = check_backends(device), process_device(device)
    if place.type != "cpu":
        torch.accelerator.set_device_index(place)
    join(timeout_s, backends)
    return place


def join_mesh(world: Control, placement: Placement, place: torch.device) -> Mesh:
    """Make the mesh of processes that have met; ConfigError if the placement has other ranks."""
    if placement.num_ranks != world.size:
        raise ConfigError(
            f"the placement has {count_text(placement.num_ranks, 'rank')}, but {world.size} "
            "processes were started; start as many, or change the placement"
        )
    background = world.waits.background
    with world.reporting(placement.names):
        # Process groups are made in the same order everywhere, or torch would mix them up.
        along_axis = partial(_along, world=world, device=place)
        shards = along_axis(placement.groups(SHARD), host_waits=False)
        axes: tuple[Collectives, ...] = (shards.tensors,)
        sums: tuple[Collectives, ...] = (Collectives(),)
        for stage in (placement.ranks.index(mesh) for mesh in placement.meshes):
            lines = placement.shard_lines(stage)
            along: tuple[Collectives, ...] = (shards.tensors,)
            if len(lines) > 1:  # all processes make all groups
                along = tuple(along_axis(line, host_waits=False).tensors for line in lines)
            beside = tuple(along_axis(line).tensors for line in lines)
            if world.rank in chain(*placement.ranks[stage]):
                axes, sums = along, beside
        mesh = Mesh(
            placement,
            background.timeout_s,
            place,
            world,
            stages=along_axis(placement.groups(STAGE)),
            replicas=along_axis(placement.groups(REPLICA)),
            shards=shards,
            shard_axes=axes,
            sum_axes=sums,
            processes=Processes(background.watch, background, Lifelines(world)),
        )

    # A thread that still waits for a failed peer would crash the interpreter if it woke during
    # the shutdown: the process then ends here, with an error.
    def leave() -> None:
        mesh.close()
        if mesh.processes is not None and not mesh.processes.have_ended:
            end_now(1)

    atexit.register(leave)
    return mesh


def _along(
    groups: Sequence[tuple[int, ...]],
    world: Control,
    device: torch.device,
    *,
    host_waits: bool = True,
) -> Control:
    """Make these groups of ranks, all of them in every process; return this process's group."""
    control, timeout_s = Control(), world.waits.background.timeout_s
    for ranks in groups:
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks, None if device.type == "cpu" else patient(timeout_s))
        if world.rank in ranks:
            tensors = replace(
                world.tensors,
                rank=ranks.index(world.rank),
                ranks=ranks,
                group=group,
                host_waits=host_waits,
            )
            control = replace(world, tensors=tensors)
            if device.type != "cpu":
                world.waits.background.watch.wake_on_failure(tensors)
    return control


def _check_counts(counts: dict[str, int | None], placement: Placement | None) -> None:
    for name, value in counts.items():
        if value is not None:
            check_count(name, value)
    check_kind("placement", placement, (Placement, type(None)), "a penstock Placement, or None")
    if placement is not None and set(counts.values()) - {None, 1}:
        texts = [f"{name}={value}" for name, value in counts.items() if value not in (None, 1)]
        raise ConfigError(
            f"placement= says who runs what, and {', '.join(texts)} is given too; leave one out"
        )
