"""What each layer costs for micro-batches of any size: the numbers for simulators and planners.

Seconds are measured ones where the profile was measured on the device, and a roofline's elsewhere.
Sizes that were not looked at lie on the line through the two nearest ones that were.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

from penstock.errors import ConfigError, check_count
from penstock.interval import likely

from .device import Device
from .profile import AtSize, LayerKind, LayerSeconds, Part, Profile, Value
from .roofline import Known, operators_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPrice:
    """What one layer costs for one micro-batch.

    Seconds are those of `LayerSeconds`, bytes those of `LayerKind`.  A host issues
    `forward_operators` for a forward, and `backward_operators` for a whole backward.  With
    `adds_gradients` seconds are measured ones, in which those of weights are added to others.
    """

    forward_s: float = 0.0
    recompute_s: float = 0.0
    backward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    forward_operators: int = 0
    backward_operators: int = 0
    inner_bytes: int = 0
    left_bytes: int = 0
    adds_gradients: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the layers of a model cost on one device, for one micro-batch of so many samples.

    `values`, `saved`, `loss_saved` and `target_bytes` are those of `AtSize`; `loss` costs nothing
    where the profile has none.
    """

    microbatch_size: int
    layers: tuple[LayerPrice, ...]
    values: tuple[Value, ...]
    saved: tuple[tuple[int, ...], ...]
    loss: LayerPrice
    loss_saved: tuple[int, ...] = ()
    target_bytes: int = 0


class _How(NamedTuple):
    """What prices are wanted: see `prices`."""

    device: Device | None
    like: Device | None
    choose: Known
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
    choose: Known = likely,
    *,
    busy: bool = False,
    like: Device | None = None,
) -> Prices:
    """Return what each layer costs on a device for one micro-batch of so many samples.

    Measured seconds count where the profile was measured on a device of this name, or no device
    is given: with `busy` those of a host whose cores all work, if they are there.  Elsewhere
    `choose` picks from intervals, as in `operator_seconds`.  With `like`, the device that was
    measured, another one takes as much longer as its roofline says.

    Raises:
        ConfigError: the size is not at least 1; the profile was only counted, and there is no
            device; it was measured on another device, and has no operators; or its sizes have
            other values between layers.
    """
    check_count("microbatch_size", microbatch_size)
    low, high = _nearest(profile.sizes, microbatch_size)
    how = _How(device, like, choose, busy)
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


def _at(profile: Profile, size: AtSize, how: _How) -> Prices:
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
    found = []
    for kind in kinds:
        measured = (kind.busy_seconds if how.busy else None) or kind.seconds
        seconds = measured if is_measured else _as_on(measured, kind, how)
        price = _price(kind, seconds or _by_operators(kind, device, how.choose))
        found.append(replace(price, adds_gradients=seconds is not None))
    return Prices(
        microbatch_size=size.microbatch_size,
        layers=tuple(found[kind] for kind in size.kind_of),
        values=size.values,
        saved=size.saved,
        loss=LayerPrice() if size.loss is None else found[-1],
        loss_saved=size.loss_saved,
        target_bytes=size.target_bytes,
    )


def _as_on(measured: LayerSeconds | None, kind: LayerKind, how: _How) -> LayerSeconds | None:
    """Return what was measured on one device as it is on another one, if that can be told."""
    if measured is None or how.like is None or not kind.operators:
        return None
    here, there = (_by_operators(kind, device, how.choose) for device in (how.device, how.like))

    def scaled(name: str) -> float:
        seconds: float = getattr(measured, name)
        known: float = getattr(there, name)
        return seconds * getattr(here, name) / known if known else seconds

    names = (field.name for field in fields(LayerSeconds) if field.name.endswith("_s"))
    return replace(measured, **{name: scaled(name) for name in names})


def _by_operators(kind: LayerKind, device: Device | None, choose: Known) -> LayerSeconds:
    """Price the operators of a layer; without a device it is one that has never run."""
    forward_s, input_s, weight_s = (
        0.0 if device is None else operators_seconds(kind.operators, device, part, choose)
        for part in (Part.FORWARD, Part.INPUT, Part.WEIGHT)
    )
    return LayerSeconds(
        forward_s=forward_s,
        recompute_s=forward_s,
        backward_s=input_s + weight_s,
        input_s=input_s,
        weight_s=weight_s,
    )


def _price(kind: LayerKind, seconds: LayerSeconds) -> LayerPrice:
    forwards = sum(x.count for x in kind.operators if x.part is Part.FORWARD)
    return LayerPrice(
        forward_s=seconds.forward_s,
        recompute_s=seconds.recompute_s,
        backward_s=seconds.backward_s,
        input_s=seconds.input_s,
        weight_s=seconds.weight_s,
        forward_operators=forwards,
        backward_operators=sum(x.count for x in kind.operators) - forwards,
        inner_bytes=kind.inner_bytes,
        left_bytes=kind.left_bytes,
    )


def _proportional(found: Prices, wanted: int) -> Prices:
    """Return the prices at another size than the only one that is known: they grow with it."""
    empty = replace(
        found,
        microbatch_size=0,
        layers=tuple(_of_nothing(layer) for layer in found.layers),
        values=tuple(replace(value, num_bytes=_lasting(value)) for value in found.values),
        loss=_of_nothing(found.loss),
        target_bytes=0,
    )
    return _between(empty, found, wanted)


def _of_nothing(layer: LayerPrice) -> LayerPrice:
    return LayerPrice(
        forward_operators=layer.forward_operators,
        backward_operators=layer.backward_operators,
        adds_gradients=layer.adds_gradients,
    )


def _lasting(value: Value) -> int:
    """Return the bytes of a value that do not depend on the batch."""
    return value.num_bytes if value.is_weight else 0


def _between(low: Prices, high: Prices, wanted: int) -> Prices:
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
    return Prices(
        microbatch_size=wanted,
        layers=tuple(_priced(a, b, line) for a, b in zip(low.layers, high.layers, strict=True)),
        values=tuple(
            replace(a, num_bytes=round(line.at(a.num_bytes, b.num_bytes)))
            for a, b in zip(low.values, high.values, strict=True)
        ),
        saved=high.saved,
        loss=_priced(low.loss, high.loss, line),
        loss_saved=high.loss_saved,
        target_bytes=round(line.at(low.target_bytes, high.target_bytes)),
    )


def _are_alike(low: Prices, high: Prices) -> bool:
    """Tell whether the same values go between the same layers."""

    def ways(found: Prices) -> list[tuple[int, tuple[int, ...]]]:
        return [(value.producer, value.consumers) for value in found.values]

    return ways(low) == ways(high)


def _priced(low: LayerPrice, high: LayerPrice, line: _Line) -> LayerPrice:
    names = (field.name for field in fields(low) if field.name != "adds_gradients")
    found = {name: line.at(getattr(low, name), getattr(high, name)) for name in names}
    numbers = {n: x if n.endswith("_s") else round(x) for n, x in found.items()}
    return replace(high, **numbers)  # type: ignore[arg-type]  # by name
