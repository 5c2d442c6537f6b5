"""Profiles made by hand, and clusters to plan for, of numbers that are easy to add up."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.costs.cluster import Cluster, Device, Host, Link
from penstock.costs.layer_facts import LayerFacts
from penstock.costs.profile import Profile
from penstock.costs.records import (
    AtSize,
    LayerKind,
    LayerSeconds,
    LayerWeights,
    Operator,
    Part,
    Value,
)

DEVICE = Device(
    name="a", flops_per_s={"float32": 1e9}, bytes_per_s=1e9, memory_bytes=1, efficiency={"gemm": 1}
)
OTHER = replace(DEVICE, name="b", flops_per_s={"float32": 5e8})


def seconds(samples: float) -> LayerSeconds:
    """Take 1 s, and 1 s a sample; backwards twice that."""
    forward_s = 1 + samples
    return LayerSeconds(
        forward_s=forward_s,
        recompute_s=forward_s,
        backward_s=2 * forward_s,
        input_s=forward_s,
        weight_s=forward_s + 0.5,
        spread=0.1,
    )


def operators(samples: int) -> tuple[Operator, ...]:
    """Products of 1 GFLOP a sample in each part; the forward has two of them."""
    parts = (Part.FORWARD, Part.FORWARD, Part.INPUT, Part.WEIGHT)
    return tuple(
        Operator(name="gemm", part=part, flops=samples * 10**9, num_bytes=0) for part in parts
    )


def at_size(samples: int, *, is_measured: bool = True) -> AtSize:
    """Two layers of one kind, with a skip of the input to the second."""
    kind = LayerKind(
        operators=operators(samples),
        inner_bytes=100 * samples,
        left_bytes=10 * samples,
        seconds=seconds(samples) if is_measured else None,
        busy_seconds=seconds(9 * samples) if is_measured else None,
    )
    return AtSize(
        microbatch_size=samples,
        kinds=(kind,),
        kind_of=(0, 0),
        values=(
            Value(-1, (0, 1), 4 * samples, 0, has_gradient=False),
            Value(0, (1,), 8 * samples, 1),
            Value(0, (1,), 64, 2, is_weight=True),
            Value(1, (), 8 * samples, 3),
        ),
        saved=((0,), (0, 1)),
        loss=replace(kind, inner_bytes=7 * samples),
    )


def profile(
    *sizes: AtSize, measured_on: str | None = "a", weight_bytes: int = 64, threads: int = 1
) -> Profile:
    """Layers with as many weights each, which cost what is given for some sizes."""
    num_layers = len(sizes[0].kind_of)
    weights = LayerWeights(
        parameter_bytes=weight_bytes, gradient_bytes=weight_bytes, optimizer_bytes=2 * weight_bytes
    )
    facts = (LayerFacts.of(str(n), "Linear", 16, {"weight": (4, 4)}) for n in range(num_layers))
    return Profile(
        name="by hand",
        layers=tuple(facts),
        spans=tuple((n, n + 1) for n in range(num_layers)),
        weights=(weights,) * num_layers,
        sizes=sizes,
        measured_on=measured_on,
        threads=threads,
        environment=(("torch", "2"),),
    )


def chain(
    forwards_s: Sequence[float],
    *,
    inner_bytes: int = 1000,
    weight_bytes: int = 4000,
    threads: int = 1,
) -> Profile:
    """Layers measured with micro-batches of one sample: a backward takes two forwards."""
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
    at = AtSize(
        microbatch_size=1,
        kinds=kinds,
        kind_of=tuple(range(count)),
        values=tuple(Value(a, b, 100, n, has_gradient=a >= 0) for n, (a, b) in enumerate(ways)),
        saved=((),) * count,
    )
    return profile(at, weight_bytes=weight_bytes, threads=threads)


def cluster(
    num_devices: int,
    *,
    bytes_per_s: float = 1e6,
    latency_s: float = 0.01,
    memory_bytes: int = 10**9,
    busy_speed: tuple[float, ...] = (),
    num_hosts: int = 1,
) -> Cluster:
    """Give hosts with so many cores each, one link between any two."""
    host = Host(
        name="host",
        devices=(DEVICE.name,) * num_devices,
        count=num_hosts,
        port="link",
        network="link",
        busy_speed=busy_speed,
    )
    return Cluster(
        name="here",
        devices={DEVICE.name: replace(DEVICE, memory_bytes=memory_bytes, torch_type="cpu")},
        hosts=(host,),
        links={"link": Link(bytes_per_s=bytes_per_s, latency_s=latency_s)},
    )
