"""A small profile, made by hand."""

from dataclasses import replace

from penstock.costs.device import Device
from penstock.costs.layer_facts import LayerFacts
from penstock.costs.operators import Operator, Part
from penstock.costs.profile import (
    AtSize,
    LayerKind,
    LayerSeconds,
    LayerWeights,
    Profile,
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


def profile(*sizes: AtSize, measured_on: str | None = "a") -> Profile:
    weights = LayerWeights(parameter_bytes=64, gradient_bytes=64, optimizer_bytes=128)
    return Profile(
        name="Two",
        layers=tuple(LayerFacts.of(str(n), "Linear", 16, {"weight": (4, 4)}) for n in (0, 1)),
        spans=((0, 1), (1, 2)),
        weights=(weights, replace(weights, parameter_bytes=0)),
        sizes=sizes,
        measured_on=measured_on,
        environment=(("torch", "2"),),
    )
