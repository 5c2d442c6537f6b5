"""See whether the processes of a job run on the hosts and devices that a cluster describes."""

import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from penstock.costs.cluster import Cluster
from penstock.doctor.facts import machine_id
from penstock.errors import ConfigError
from penstock.mesh.control import Control
from penstock.trace.units import bytes_text, count_text


def check_devices(cluster: Cluster, count: int) -> None:
    """Refuse a cluster of more or fewer devices than there are processes.

    Raises:
        ConfigError: says both numbers.
    """
    if len(cluster.places) != count:
        raise ConfigError(
            f"the cluster {cluster.name} has {count_text(len(cluster.places), 'device')}, and "
            f"there {'is' if count == 1 else 'are'} {count_text(count, 'process')}; start one for "
            "each device (torchrun --nproc-per-node), or describe the devices that these run on"
        )


def check_hosts(cluster: Cluster, world: Control, device: torch.device) -> None:
    """Refuse a cluster that is not what the processes run on; all of them call it.

    Those on one host there must be on one here, on devices of that kind, and each with as much
    memory.  Several hosts there may be one here, to try a plan.

    Raises:
        ConfigError: on all processes alike; says which rank differs, and how.
    """
    check_devices(cluster, world.size)
    memory = 0
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    facts = [machine_id(), socket.gethostname(), device.type, memory]
    found = world.gather(facts, "to see whether the cluster is what the processes run on")
    for what in _differences(cluster, found):
        raise ConfigError(
            f"the cluster {cluster.name} is not what this job runs on: {what}. Describe it as it "
            "is (penstock doctor --calibrate), with devices in the order of ranks"
        )


def _differences(cluster: Cluster, found: Sequence[Any]) -> Iterator[str]:
    first: dict[int, int] = {}
    for rank, (place, facts) in enumerate(zip(cluster.places, found, strict=True)):
        machine, host, kind, memory = facts
        before = first.setdefault(place.host, rank)
        other, name, *_ = found[before]
        if other != machine:
            yield (
                f"ranks {before} and {rank} are on one host there, {place.host_name}, and here on "
                f"two, {name} and {host}"
            )
        described = cluster.device_of(rank)
        if described.torch_type != kind:
            yield (
                f"rank {rank} has a device of kind {described.torch_type!r} there, and computes "
                f"on {kind!r}"
            )
        if memory and memory < 0.9 * described.memory_bytes:  # some of it is the driver's
            yield (
                f"the device of rank {rank} has {bytes_text(int(described.memory_bytes))} there, "
                f"and {bytes_text(memory)} here"
            )
