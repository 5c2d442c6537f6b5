"""Clusters of made-up hardware that tests of clusters share."""

from typing import Any

from penstock.costs.cluster import Cluster, Device, Host, Link

DEVICE = Device(name="a", flops_per_s={"float32": 1e12}, bytes_per_s=1e11, memory_bytes=2**30)
LINKS = {
    "bus": Link(bytes_per_s=8e9, latency_s=1e-6),
    "half": Link(bytes_per_s=4e9, latency_s=2e-6, duplex=False),
    "net": Link(bytes_per_s=1e9, latency_s=1e-5, overhead_s=3e-6, blocks=True),
}


def cluster_of(*hosts: Host, **changes: Any) -> Cluster:
    """Return a cluster of hosts with devices "a" and the links above."""
    parts: dict[str, Any] = {"devices": {"a": DEVICE}, "links": LINKS, **changes}
    return Cluster(name="made up", hosts=hosts, **parts)


def host(num_devices: int = 2, **fields: Any) -> Host:
    """Return a host of so many devices "a", on the bus."""
    parts: dict[str, Any] = {"name": "h", "devices": ("a",) * num_devices, "port": "bus"}
    return Host(**{**parts, **fields})
