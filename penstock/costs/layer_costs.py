"""Costs of each layer on a device, for micro-batches of any size.

The device on which the profile was measured has the measured seconds, any other a roofline's.  A
size that the profile lacks lies on the line through the two nearest sizes.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import ConfigError, check_count

from .cluster import Device
from .profile import Profile
from .records import PARTS, AtSize, LayerKind, LayerSeconds, Part
from .roofline import operators_seconds


class _Line(NamedTuple):
    """The place of a size on the line through two others."""

    share: float
    """0 at the lower size, 1 at the higher one."""
    ratio: float
    """Samples of the size over samples of the nearest of the two."""

    def at(self, low: float, high: float) -> float:
        """Return the value there, from the values of the two sizes; never below 0."""
        # beyond the ends the nearest size decides where the line falls below 0 or its share
        on_line = low + (high - low) * self.share
        if self.share < 0:
            return max(on_line, low * self.ratio)
        return max(on_line, high) if self.share > 1 else on_line


def layer_costs(
    profile: Profile,
    device: Device | None,
    microbatch_size: int,
    *,
    busy: bool = False,
    like: Device | None = None,
) -> AtSize:
    """Return the costs of each layer on a device (None: the measured one) for one micro-batch.

    With `busy` the seconds count that were measured while all cores work.  `like` is the measured
    device, whose seconds are scaled by the roofline to `device`.

    Raises:
        ConfigError: the size is not at least 1; the profile was only counted, and there is no
            device; it was measured on another device, and has no operators; or its sizes have
            other values between layers.
    """
    # 1. Find the two profiled sizes on whose line the wanted size lies.
    check_count("microbatch_size", microbatch_size)
    low, high = _nearest(profile.sizes, microbatch_size)

    # 2. Price a profiled size: measured seconds, or scaled ones, or those of the roofline.
    def known(size: AtSize) -> AtSize:
        is_measured = _is_measured(profile, size, device)

        def on_device(kind: LayerKind) -> LayerKind:
            seconds = (kind.busy_seconds if busy else None) or kind.seconds
            if not is_measured:
                seconds = _scaled(seconds, kind, device, like)
            return replace(kind, seconds=seconds or by_roofline(kind, device))

        return size.with_kinds(on_device)

    # 3. A profile of one size lies on a line with 0 samples.
    if low.microbatch_size == microbatch_size:
        return known(low)
    if low is high:
        return _between(_of_nothing(known(low)), known(low), microbatch_size)
    return _between(known(low), known(high), microbatch_size)


def _nearest(sizes: Sequence[AtSize], wanted: int) -> tuple[AtSize, AtSize]:
    """Return the two sizes on the line to a wanted one; that size, or an only one, twice."""
    same = next((size for size in sizes if size.microbatch_size == wanted), None)
    if same is not None or len(sizes) == 1:
        return same or sizes[0], same or sizes[0]
    pairs = list(pairwise(sizes))
    return next((pair for pair in pairs if wanted < pair[1].microbatch_size), pairs[-1])


def _is_measured(profile: Profile, size: AtSize, device: Device | None) -> bool:
    """Tell if the profile was measured on a device; refuse a device without any costs."""
    if device is None and profile.measured_on is None:
        raise ConfigError(
            f"the operators of {profile.name} were counted, and not measured; say for which "
            "device their seconds are wanted"
        )
    is_measured = device is None or device.name == profile.measured_on
    kinds = [*size.kinds, *([] if size.loss is None else [size.loss])]
    if not is_measured and not any(kind.operators for kind in kinds):
        raise ConfigError(
            f"the profile of {profile.name} was measured on {profile.measured_on}, and its "
            f"operators were not counted, so nothing is known of another device; measure it there"
        )
    return is_measured


def _scaled(
    measured: LayerSeconds | None, kind: LayerKind, device: Device | None, like: Device | None
) -> LayerSeconds | None:
    """Scale seconds measured on `like` to a device by their roofline times; None if unknown."""
    if measured is None or like is None or not kind.operators:
        return None
    here, there = by_roofline(kind, device), by_roofline(kind, like)

    def scaled(name: str) -> float:
        seconds: float = getattr(measured, name)
        known: float = getattr(there, name)
        return seconds * getattr(here, name) / known if known else seconds

    return replace(measured, **{name: scaled(name) for name in PARTS})  # type: ignore[arg-type]


def by_roofline(kind: LayerKind, device: Device | None) -> LayerSeconds:
    """Return the roofline times of a layer; 0 without a device, for a layer that never ran."""
    forward_s, input_s, weight_s = (
        0.0 if device is None else operators_seconds(kind.operators, device, part)
        for part in (Part.FORWARD, Part.INPUT, Part.WEIGHT)
    )
    return LayerSeconds(
        forward_s=forward_s,
        recompute_s=forward_s,
        backward_s=input_s + weight_s,
        input_s=input_s,
        weight_s=weight_s,
        is_measured=False,
    )


def _of_nothing(costs: AtSize) -> AtSize:
    """Return the costs of 0 samples: only weights have bytes."""
    zeros = dict.fromkeys(PARTS, 0.0)

    def empty(kind: LayerKind) -> LayerKind:
        assert kind.seconds is not None, "they are known on the device"
        seconds = replace(kind.seconds, **zeros)  # type: ignore[arg-type]  # by name
        return replace(kind, inner_bytes=0, left_bytes=0, seconds=seconds)

    values = tuple(v if v.is_weight else replace(v, num_bytes=0) for v in costs.values)
    empty_costs = costs.with_kinds(empty)
    return replace(empty_costs, microbatch_size=0, values=values, target_bytes=0)


def _between(low: AtSize, high: AtSize, wanted: int) -> AtSize:
    """Return the costs on the line through two sizes."""
    # 1. Check that both sizes have the same values between the same layers.
    edges = [[(value.producer, value.consumers) for value in size.values] for size in (low, high)]
    if edges[0] != edges[1]:
        raise ConfigError(
            f"a profile has other values between layers for micro-batches of "
            f"{low.microbatch_size} samples than for those of {high.microbatch_size}, so nothing "
            f"is known of {wanted}; profile that size too"
        )
    # 2. Put the line through both, for each pair of kinds that a layer has in the two.
    distance = high.microbatch_size - low.microbatch_size
    nearest = low if wanted < low.microbatch_size else high
    line = _Line((wanted - low.microbatch_size) / distance, wanted / nearest.microbatch_size)
    pairs = list(zip(low.kind_of, high.kind_of, strict=True))
    kinds = {pair: n for n, pair in enumerate(dict.fromkeys(pairs))}
    return replace(
        high,
        microbatch_size=wanted,
        kinds=tuple(_kind_between(low.kinds[a], high.kinds[b], line) for a, b in kinds),
        kind_of=tuple(kinds[pair] for pair in pairs),
        values=tuple(
            replace(a, num_bytes=round(line.at(a.num_bytes, b.num_bytes)))
            for a, b in zip(low.values, high.values, strict=True)
        ),
        loss=None if not low.loss or not high.loss else _kind_between(low.loss, high.loss, line),
        target_bytes=round(line.at(low.target_bytes, high.target_bytes)),
    )


def _kind_between(low: LayerKind, high: LayerKind, line: _Line) -> LayerKind:
    one, other = low.seconds, high.seconds
    assert one is not None and other is not None, "they are known on the device"
    seconds = {name: line.at(getattr(one, name), getattr(other, name)) for name in PARTS}
    return replace(
        high,
        inner_bytes=round(line.at(low.inner_bytes, high.inner_bytes)),
        left_bytes=round(line.at(low.left_bytes, high.left_bytes)),
        seconds=replace(other, **seconds),  # type: ignore[arg-type]  # by name
    )
