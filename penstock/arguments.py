"""Check and complete what the front door was given, before anything is built."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, ExecutionWarning, PartitionError, check_count
from penstock.mesh import Mesh
from penstock.model.layers import Layers
from penstock.model.pytree import flatten
from penstock.model.stages import check_partition
from penstock.runtime.devices import num_cores, with_index
from penstock.schedules import Family
from penstock.types import Reduction

Devices = Sequence[torch.device | str | int] | torch.device | str | None


def resolve_num_stages(
    num_stages: int | None, partition: Sequence[int] | None, layers: Layers
) -> int:
    """Decide K from what was given of `num_stages` and `partition`.

    Raises:
        PartitionError: neither is given, both disagree, or the layers are too few.
    """
    if partition is not None:
        check_partition(tuple(partition), len(layers))
        if num_stages not in (None, len(partition)):
            raise PartitionError(
                f"num_stages={num_stages}, but partition={list(partition)} has {len(partition)} "
                "stages; give one of the two"
            )
        return len(partition)
    if num_stages is None:
        raise PartitionError("give num_stages=K, or partition=[layers per stage, ...]")
    check_count("num_stages", num_stages)
    layers.check_enough(num_stages)
    return num_stages


def stages_of_mesh(
    mesh: Mesh | None,
    num_stages: int | None,
    partition: Sequence[int] | None,
    schedule: Family,
) -> int | None:
    """Decide K: as asked, else as many as the schedule has on the ranks of a mesh."""
    if mesh is None:
        return num_stages
    if num_stages is not None:
        return num_stages
    return len(partition or ()) or mesh.num_stages * schedule.stages_per_rank


def resolve_ranks(schedule: Family, num_stages: int, mesh: Mesh | None) -> tuple[int, ...]:
    """Ask the schedule for the rank of each stage.

    Raises:
        ConfigError: the schedule is of another size, for another number of ranks, or leaves one of
            them without a stage.
    """
    ranks = schedule.ranks(num_stages)
    if mesh is None:
        return ranks
    if mesh.num_stages != 1 + max(ranks):
        raise ConfigError(
            f"the mesh has {mesh.num_stages} ranks a pipeline, the schedule runs {num_stages} "
            f"stages on {1 + max(ranks)}; leave out num_stages and partition, give init_mesh "
            f"num_stages={1 + max(ranks)}, or run several stages on a rank "
            "(schedule=schedules.interleaved_1f1b(stages_per_rank=...))"
        )
    if idle := sorted(set(range(mesh.num_stages)) - set(ranks)):
        raise ConfigError(
            f"the schedule gives rank {', '.join(map(str, idle))} of the mesh no stage; give each "
            f"rank one, or start fewer processes: stages 0 to {num_stages - 1} run on ranks "
            f"{list(ranks)}"
        )
    return ranks


def resolve_threads(threads_per_stage: int | None, ranks: Sequence[int], mesh: Mesh | None) -> int:
    """Decide the intra-op threads of a stage: as asked, at most the cores; else torch's count for
    this process (OMP_NUM_THREADS, torch.set_num_threads) divided among its ranks.

    Raises:
        ConfigError: `threads_per_stage` is no whole number of at least 1.
    """
    if threads_per_stage is None:
        in_process = 1 if mesh is not None and mesh.is_distributed else 1 + max(ranks)
        return max(1, torch.get_num_threads() // in_process)
    asked, cores = check_count("threads_per_stage", threads_per_stage), num_cores()
    if asked > cores:
        warnings.warn(
            f"threads_per_stage={asked}, and this process may use {cores} cores: each stage "
            f"computes with {cores} threads. Some kernels round differently for another count; "
            f"to compare with another machine, give both the same number, at most {cores}",
            ExecutionWarning,
            stacklevel=3,
        )
    return min(asked, cores)


def check_targets(targets: Any) -> None:
    """Refuse targets that a loss would have to send gradients to.

    Raises:
        ConfigError: a tensor in them requires grad.
    """
    for leaf in flatten(targets)[0]:
        if leaf.requires_grad:
            raise ConfigError(
                f"a target of shape {tuple(leaf.shape)} requires grad; train_step computes no "
                "gradients of targets. Give target.detach(), or pass it with the inputs"
            )


def check_loss_scale(loss_scale: Any) -> float:
    """Give `loss_scale` as a float, if gradients can be divided by it again.

    Raises:
        ConfigError: it is no number, not above 0, or not finite.
    """
    if not isinstance(loss_scale, Real) or not 0 < float(loss_scale) < math.inf:
        raise ConfigError(
            f"loss_scale={loss_scale!r}; it must be a finite number above 0, such as "
            "GradScaler.get_scale() gives"
        )
    return float(loss_scale)


def device_of_process(devices: Devices, mesh: Mesh) -> torch.device:
    """Return where all stages of this process run: in a mesh of processes, on its one device.

    Raises:
        ConfigError: other devices are asked for.
    """
    own = mesh.device or torch.device("cpu")
    asked = [devices] if devices is None or isinstance(devices, str | torch.device) else devices
    kinds = {"cuda" if isinstance(d, int) else torch.device(d or own).type for d in asked}
    if kinds - {own.type}:
        raise ConfigError(
            f"devices={devices!r}, but this mesh has several processes, and the stages of each "
            f"run on its own device, {own}: processes compute on CPUs so far. Leave devices out, "
            "or use one process (no torchrun), where each stage can have a GPU of this host"
        )
    return own


def resolve_devices(devices: Devices, ranks: Sequence[int]) -> list[torch.device]:
    """Give each stage its device: as asked, else the visible GPUs rank by rank, else the CPU.

    Raises:
        ConfigError: there are not as many as stages.
    """
    if devices is None:
        gpus = torch.cuda.device_count()
        return [
            torch.device("cuda", rank % gpus) if gpus else torch.device("cpu") for rank in ranks
        ]
    num_stages = len(ranks)
    if isinstance(devices, str | torch.device):
        return [with_index(torch.device(devices))] * num_stages
    if len(devices) != num_stages:
        raise ConfigError(
            f"{len(devices)} devices for {num_stages} stages; give one per stage (a device may be "
            "named several times), or one for all"
        )
    return [with_index(torch.device(device)) for device in devices]


@dataclass(frozen=True, slots=True)
class Objective:
    """The user's loss; in a container, so that a loss that is a module does not become a layer."""

    loss: Callable[[Any, Any], Tensor] | None
    reduction: Reduction | Callable[[Any], Any]
