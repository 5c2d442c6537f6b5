"""Plan for the processes of a job: measure a cluster, compare it with the job, join its mesh.

plan_mesh      rank 0: make_plan() ──► plan ──► all ranks: the mesh of its placement
"""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.costs.cluster import Cluster
from penstock.doctor.calibration.remembered import remembered
from penstock.doctor.facts import machine_id
from penstock.errors import ConfigError
from penstock.mesh import Mesh
from penstock.mesh.control import Control
from penstock.mesh.init import join_mesh, meet
from penstock.mesh.mesh import DEFAULT_TIMEOUT_S
from penstock.mesh.start import num_processes
from penstock.planner.plan import Plan
from penstock.trace.units import bytes_text
from penstock.types import Transport


def measure_cluster(num_devices: int = 1, *, renew: bool = False) -> Cluster:
    """Measure this machine; return it as a cluster of `num_devices`, one for each process.

    The figures are kept in a file, and later calls read them: docs/clusters.md.

    Args:
        num_devices: if there are more than the machine has, they share its devices.
        renew: measure again, whatever was kept.
    """
    machine = remembered(num_devices, renew=renew)
    (host,) = machine.hosts
    devices = tuple(host.devices[n % len(host.devices)] for n in range(num_devices))
    return replace(machine, hosts=(replace(host, devices=devices),)).between_processes()


def plan_mesh(
    make_plan: Callable[[], Plan],
    *,
    cluster: Cluster | None = None,
    same: Mapping[str, Any] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    device: torch.device | str | None = None,
) -> tuple[Mesh, Plan]:
    """Meet the other processes, let rank 0 plan, and join the mesh of the plan.

    The others wait however long rank 0 plans.  A process that is alone runs all stages.

    Args:
        make_plan: called on rank 0 only, for as many devices as processes.
        cluster: what the plan is made for; compared with what the processes run on.
        same: values that all processes must have been given alike, by name.
        timeout_s: deadline of every wait between processes, in seconds.
        device: what this process computes on, as for `init_mesh`.

    Raises:
        ConfigError: the cluster is not what the processes run on, or `same` differs; on all alike.
        PenstockError: what `make_plan` raises; on all alike.
        MeshError: the processes do not find each other in time.
    """
    # 1. A process that is alone needs no other.
    count = num_processes()
    if cluster is not None:
        cluster.check_devices(count)
    if count == 1:
        plan = make_plan()
        return Mesh.of_one_process(plan.placement.num_places, timeout_s), plan
    # 2. Meet, and let rank 0 plan; an error on one rank is raised on all.
    world, place = meet(dict(same or {}), timeout_s, device)
    with world.reporting():
        if cluster is not None:
            check_hosts(cluster, world, place)
        text = world.from_first(lambda: make_plan().to_json(), "for rank 0 to plan")
    # 3. All ranks read the plan from its text, so that they have the same to the bit.
    plan = Plan.from_json(text)
    placement = plan.placement.among(world.size)
    plan = replace(plan, placement=placement, transport=Transport.TORCH_DISTRIBUTED)
    return join_mesh(world, plan.placement, place), plan


def check_hosts(cluster: Cluster, world: Control, device: torch.device) -> None:
    """Check that a cluster describes the hosts and devices of this job; all processes call it.

    Ranks on one host of the cluster must be on one host, on devices of the described kind with at
    least the described memory.  Several hosts of the cluster may be one here, to try a plan.

    Raises:
        ConfigError: on all processes alike; says which rank differs, and how.
    """
    cluster.check_devices(world.size)
    memory = 0
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    facts = [machine_id(), socket.gethostname(), device.type, memory]
    of_ranks = world.gather(facts, "to see whether the cluster is what the processes run on")
    for difference in _differences(cluster, of_ranks):
        raise ConfigError(
            f"the cluster {cluster.name} is not what this job runs on: {difference}. Describe it "
            "as it is (penstock doctor --calibrate), with devices in the order of ranks"
        )


def _differences(cluster: Cluster, of_ranks: Sequence[Any]) -> Iterator[str]:
    first: dict[int, int] = {}
    for rank, (place, facts) in enumerate(zip(cluster.places, of_ranks, strict=True)):
        machine, host, kind, memory = facts
        before = first.setdefault(place.host, rank)
        other, name, *_ = of_ranks[before]
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
