"""Profiles and clusters to plan for, of numbers that are easy to add up."""

from collections.abc import Sequence

from penstock.costs.cluster import Cluster, Device, Host, Link
from penstock.costs.layer_facts import LayerFacts
from penstock.costs.profile import (
    AtSize,
    LayerKind,
    LayerSeconds,
    LayerWeights,
    Profile,
    Value,
)

DEVICE = "core"


def profile(
    forwards_s: Sequence[float],
    *,
    inner_bytes: int = 1000,
    value_bytes: int = 100,
    weight_bytes: int = 4000,
    threads: int = 1,
) -> Profile:
    """A chain measured with micro-batches of one sample: a backward takes two forwards."""
    kinds = tuple(
        LayerKind(
            operators=(),
            inner_bytes=inner_bytes,
            left_bytes=inner_bytes // 2,
            seconds=LayerSeconds(
                forward_s=s, recompute_s=s, backward_s=2 * s, input_s=s, weight_s=s
            ),
        )
        for s in forwards_s
    )
    count = len(kinds)
    ways = [(-1, (0,)), *((n, (n + 1,)) for n in range(count - 1)), (count - 1, ())]
    values = (Value(a, b, value_bytes, n, has_gradient=a >= 0) for n, (a, b) in enumerate(ways))
    return Profile(
        name="chain",
        layers=tuple(LayerFacts.of(str(n), "Layer", 1000, {}) for n in range(count)),
        spans=tuple((n, n + 1) for n in range(count)),
        weights=(
            LayerWeights(
                parameter_bytes=weight_bytes,
                gradient_bytes=weight_bytes,
                optimizer_bytes=2 * weight_bytes,
            ),
        )
        * count,
        sizes=(
            AtSize(
                microbatch_size=1,
                kinds=kinds,
                kind_of=tuple(range(count)),
                values=tuple(values),
                saved=((),) * count,
            ),
        ),
        measured_on=DEVICE,
        threads=threads,
    )


def cluster(
    num_devices: int,
    *,
    bytes_per_s: float = 1e6,
    latency_s: float = 0.01,
    memory_bytes: int = 10**9,
    busy_speed: tuple[float, ...] = (),
    num_hosts: int = 1,
) -> Cluster:
    device = Device(
        name=DEVICE,
        flops_per_s={"float32": 1e9},
        bytes_per_s=1e9,
        memory_bytes=memory_bytes,
        torch_type="cpu",
    )
    host = Host(
        name="host",
        devices=(DEVICE,) * num_devices,
        count=num_hosts,
        port="link",
        network="link",
        busy_speed=busy_speed,
    )
    link = Link(bytes_per_s=bytes_per_s, latency_s=latency_s)
    return Cluster(name="here", devices={DEVICE: device}, hosts=(host,), links={"link": link})
