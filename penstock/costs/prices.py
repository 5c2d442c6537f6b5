"""What each layer costs for micro-batches of any size: the numbers for simulators and planners.

Seconds are measured ones where the profile was measured on the device, and a roofline's elsewhere.
Sizes that were not looked at lie on the line through the two nearest ones that were.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import ConfigError, check_count

from .device import Device
from .profile import AtSize, LayerKind, LayerSeconds, Part, Profile, Value
from .roofline import operators_seconds


class _How(NamedTuple):
    """What prices are wanted: see `prices`."""

    device: Device | None
    like: Device | None
    busy: bool


class _Line(NamedTuple):
    """Where a size lies on the line through two others: at `share` of the way from one to the
    other, and at `ratio` times the nearest.
    """

    share: float
    ratio: float
    """0 between the two."""

    def at(self, low: float, high: float) -> float:
        """Return what lies there, of what two sizes have; never less than nothing.

        Beyond the ends, a line that falls would lead below 0, and one that begins below 0 says
        that small sizes cost less than their share: there the nearest size decides.
        """
        on_line = low + (high - low) * self.share
        if self.share < 0:
            return max(on_line, low * self.ratio)
        return max(on_line, high) if self.share > 1 else on_line


def prices(
    profile: Profile,
    device: Device | None,
    microbatch_size: int,
    *,
    busy: bool = False,
    like: Device | None = None,
) -> AtSize:
    """Return what each layer costs on a device for one micro-batch of so many samples.

    Measured seconds count where the profile was measured on a device of this name, or no device
    is given: with `busy` those of a host whose cores all work, if they are there.  With `like`,
    the device that was measured, another one takes as much longer as its roofline says.

    Raises:
        ConfigError: the size is not at least 1; the profile was only counted, and there is no
            device; it was measured on another device, and has no operators; or its sizes have
            other values between layers.
    """
    check_count("microbatch_size", microbatch_size)
    low, high = _nearest(profile.sizes, microbatch_size)
    how = _How(device, like, busy)
    found = _at(profile, low, how)
    if low.microbatch_size == microbatch_size:
        return found
    if low is high:
        return _proportional(found, microbatch_size)
    other = _at(profile, high, how)
    return _between(found, other, microbatch_size)


def _nearest(sizes: Sequence[AtSize], wanted: int) -> tuple[AtSize, AtSize]:
    """Return the two sizes whose line leads to the one that is wanted; that one twice if it is
    there, and the only one.
    """
    same = next((each for each in sizes if each.microbatch_size == wanted), None)
    if same is not None or len(sizes) == 1:
        return same or sizes[0], same or sizes[0]
    pairs = list(pairwise(sizes))
    return next((pair for pair in pairs if wanted < pair[1].microbatch_size), pairs[-1])


def _at(profile: Profile, size: AtSize, how: _How) -> AtSize:
    """Return the prices at a size that was looked at."""
    device = how.device
    kinds = [*size.kinds, *([] if size.loss is None else [size.loss])]
    if device is None and profile.measured_on is None:
        raise ConfigError(
            f"the operators of {profile.name} were counted, and not measured; say for which "
            "device their seconds are wanted"
        )
    is_measured = device is None or device.name == profile.measured_on
    if not is_measured and not any(kind.operators for kind in kinds):
        raise ConfigError(
            f"the profile of {profile.name} was measured on {profile.measured_on}, and its "
            f"operators were not counted, so nothing is known of another device; measure it there"
        )

    def priced(kind: LayerKind) -> LayerKind:
        measured = (kind.busy_seconds if how.busy else None) or kind.seconds
        seconds = measured if is_measured else _as_on(measured, kind, how)
        return replace(kind, seconds=seconds or _by_operators(kind, device))

    return replace(
        size,
        kinds=tuple(map(priced, size.kinds)),
        loss=None if size.loss is None else priced(size.loss),
    )


def _as_on(measured: LayerSeconds | None, kind: LayerKind, how: _How) -> LayerSeconds | None:
    """Return what was measured on one device as it is on another one, if that can be told."""
    if measured is None or how.like is None or not kind.operators:
        return None
    here, there = (_by_operators(kind, device) for device in (how.device, how.like))

    def scaled(name: str) -> float:
        seconds: float = getattr(measured, name)
        known: float = getattr(there, name)
        return seconds * getattr(here, name) / known if known else seconds

    return replace(measured, **{name: scaled(name) for name in _SECONDS})  # type: ignore[arg-type]


def _by_operators(kind: LayerKind, device: Device | None) -> LayerSeconds:
    """Price the operators of a layer; without a device it is one that has never run."""
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


def _proportional(found: AtSize, wanted: int) -> AtSize:
    """Return the prices at another size than the only one that is known: they grow with it."""
    empty = replace(
        found,
        microbatch_size=0,
        kinds=tuple(map(_of_nothing, found.kinds)),
        values=tuple(replace(value, num_bytes=_lasting(value)) for value in found.values),
        loss=None if found.loss is None else _of_nothing(found.loss),
        target_bytes=0,
    )
    return _between(empty, found, wanted)


def _of_nothing(kind: LayerKind) -> LayerKind:
    none = dict.fromkeys(_SECONDS, 0.0)
    seconds = None if kind.seconds is None else replace(kind.seconds, **none)  # type: ignore[arg-type]
    return replace(kind, inner_bytes=0, left_bytes=0, seconds=seconds)


def _lasting(value: Value) -> int:
    """Return the bytes of a value that do not depend on the batch."""
    return value.num_bytes if value.is_weight else 0


def _between(low: AtSize, high: AtSize, wanted: int) -> AtSize:
    """Return the prices on the line through two sizes."""
    if not _are_alike(low, high):
        raise ConfigError(
            f"a profile has other values between layers for micro-batches of "
            f"{low.microbatch_size} samples than for those of {high.microbatch_size}, so nothing "
            f"is known of {wanted}; profile that size too"
        )
    distance = high.microbatch_size - low.microbatch_size
    nearest = low if wanted < low.microbatch_size else high
    line = _Line((wanted - low.microbatch_size) / distance, wanted / nearest.microbatch_size)
    pairs = list(zip(low.kind_of, high.kind_of, strict=True))
    kinds = {pair: n for n, pair in enumerate(dict.fromkeys(pairs))}
    return replace(
        high,
        microbatch_size=wanted,
        kinds=tuple(_priced(low.kinds[a], high.kinds[b], line) for a, b in kinds),
        kind_of=tuple(kinds[pair] for pair in pairs),
        values=tuple(
            replace(a, num_bytes=round(line.at(a.num_bytes, b.num_bytes)))
            for a, b in zip(low.values, high.values, strict=True)
        ),
        loss=None if not low.loss or not high.loss else _priced(low.loss, high.loss, line),
        target_bytes=round(line.at(low.target_bytes, high.target_bytes)),
    )


def _are_alike(low: AtSize, high: AtSize) -> bool:
    """Tell whether the same values go between the same layers."""

    def ways(found: AtSize) -> list[tuple[int, tuple[int, ...]]]:
        return [(value.producer, value.consumers) for value in found.values]

    return ways(low) == ways(high)


def _priced(low: LayerKind, high: LayerKind, line: _Line) -> LayerKind:
    assert low.seconds is not None and high.seconds is not None, "both are priced"
    one, other = low.seconds, high.seconds
    seconds = {name: line.at(getattr(one, name), getattr(other, name)) for name in _SECONDS}
    return replace(
        high,
        inner_bytes=round(line.at(low.inner_bytes, high.inner_bytes)),
        left_bytes=round(line.at(low.left_bytes, high.left_bytes)),
        seconds=replace(other, **seconds),  # type: ignore[arg-type]  # by name
    )


_SECONDS = tuple(field.name for field in fields(LayerSeconds) if field.name.endswith("_s"))
