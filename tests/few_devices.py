"""Clusters of few devices, for plans on sub-meshes."""

from typing import Any

import penstock
from penstock.costs.cluster import Device, Host, Link


def cluster(*hosts: int, near: float = 1e11, far: float = 1e8, **device: Any) -> penstock.Cluster:
    """Describe hosts with so many devices, and how many bytes go between them in a second."""
    usual = {"flops_per_s": {"float32": 1e11}, "bytes_per_s": 1e11, "memory_bytes": 1 << 30}
    core = Device(name="core", **{**usual, **device})
    return penstock.Cluster(
        name="few",
        devices={"core": core},
        hosts=tuple(
            Host(name=f"host{n}", devices=("core",) * count, port="near", network="far")
            for n, count in enumerate(hosts)
        ),
        links={"near": Link(bytes_per_s=near), "far": Link(bytes_per_s=far, latency_s=1e-6)},
    )
