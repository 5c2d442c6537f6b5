"""Profile of a model: the costs of its layers for some micro-batch sizes, measured or counted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, UnreadableError
from penstock.plain_values import from_json, path_of, to_json
from penstock.trace.units import bytes_text, columns, count_text, percent_text, time_text

from .layer_facts import LayerFacts, first_difference
from .records import AtSize, LayerKind, LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Costs of a model's layers, for micro-batches of some sizes.

    Raises:
        ConfigError: parts of it do not fit together.
    """

    name: str
    layers: tuple[LayerFacts, ...]
    spans: tuple[tuple[int, int], ...]
    """Ranges (start, end) of layers that have to share a stage."""
    weights: tuple[LayerWeights, ...]
    sizes: tuple[AtSize, ...]
    measured_on: str | None = None
    """Name of the measured device; None if costs were only counted."""
    threads: int = 1
    """Intra-op threads of each stage when it was measured."""
    environment: tuple[tuple[str, str], ...] = field(default=())
    """Names and values: versions, machine, date."""
    operators: Any = field(default=None, compare=False, repr=False)
    """The model's `Operators` (counting/graph.py) for sharding; not in files."""

    def __post_init__(self) -> None:
        num_layers = len(self.layers)
        if not num_layers or not self.sizes:
            raise ConfigError("a profile needs at least one layer, and one micro-batch size")
        # 1. Every list has an entry for each layer.
        for name, of_layers in (
            ("weights", self.weights),
            *((f"sizes[{n}].kind_of", size.kind_of) for n, size in enumerate(self.sizes)),
            *((f"sizes[{n}].saved", size.saved) for n, size in enumerate(self.sizes)),
        ):
            if len(of_layers) != num_layers:
                raise ConfigError(
                    f"a profile of {num_layers} layers has {name} for {len(of_layers)}; give one "
                    "entry for each layer"
                )
        # 2. Sizes rise, and name entries that there are; no number is below 0.
        sizes = [size.microbatch_size for size in self.sizes]
        if sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ConfigError(
                f"the micro-batch sizes of a profile are {sizes}; give each once, in order, from 1"
            )
        for n, size in enumerate(self.sizes):
            self._check(n, size)
        wrong = _below_zero(self.weights, "weights") or _below_zero(self.sizes, "sizes")
        if wrong:
            raise ConfigError(f"{wrong} in a profile; it must be at least 0")

    def _check(self, n: int, size: AtSize) -> None:
        places: Sequence[tuple[str, Sequence[int], int]] = (
            ("kind_of", size.kind_of, len(size.kinds)),
            ("saved", [v for of_layer in size.saved for v in of_layer], len(size.values)),
            ("loss_saved", size.loss_saved, len(size.values)),
        )
        for name, numbers, count in places:
            wrong = [x for x in numbers if not 0 <= x < count]
            if wrong:
                raise ConfigError(
                    f"sizes[{n}].{name} of a profile names entry {wrong[0]}, and there are {count}"
                )

    def check_model(self, layers: Sequence[LayerFacts]) -> None:
        """Refuse a model that the profile does not describe.

        Raises:
            ConfigError: names the first layer that differs.
        """
        differs = first_difference(self.layers, layers, "profile")
        if differs is not None:
            raise ConfigError(
                f"the profile is of another model: {differs}. Make a profile of this model"
            )

    def save(self, path: str | Path) -> None:
        """Write the profile to a file, as JSON.

        Raises:
            UnreadableError: the file cannot be written.
        """
        file = path_of(path, "Profile")
        try:
            file.write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise UnreadableError(f"{path}: it cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> "Profile":
        """Read a profile that `save` wrote.

        Raises:
            UnreadableError, ConfigError: the file has no profile; names it and the place in it.
        """
        file = path_of(path, "Profile")
        try:
            return cls.from_json(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise UnreadableError(f"{path}: it cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UnreadableError(f"{path}: it is damaged, or no JSON: no UTF-8 text") from None
        except ConfigError as error:
            raise type(error)(f"{path}: {error}") from None

    def to_json(self) -> str:
        """Return the profile as JSON, which `from_json` reads."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "Profile":
        """Read a profile that `to_json` wrote.

        Raises:
            UnreadableError: the text is cut off, or a value is missing, unknown or mistyped.
            ConfigError: values do not fit together.
        """
        profile: Profile = from_json(cls, text)
        return profile

    def __str__(self) -> str:
        return "\n".join(profile_lines(self))


def _below_zero(value: object, where: str) -> str:
    """Return a text about the first number below 0, or NaN, in a value; "" if there is none."""
    if isinstance(value, int | float):
        return "" if value >= 0 else f"{where} is {value!r}"
    if isinstance(value, tuple):
        parts = [(f"[{n}]", part) for n, part in enumerate(value)]
    elif is_dataclass(value):
        names = [f.name for f in fields(value) if f.name != "producer"]  # -1 is the model's input
        parts = [(f".{name}", getattr(value, name)) for name in names]
    else:
        return ""
    faults = (_below_zero(part, where + place) for place, part in parts)
    return next(filter(None, faults), "")


_HEAD = ("layer", "kind", "draws")
_COUNTED = ("GFLOPs", "kept", "boundary", "parameters")
_TIMES = ("F", "B", "W", "recompute")


def profile_lines(profile: Profile, priced: Sequence[AtSize] = ()) -> Iterator[str]:
    """Yield a table for each micro-batch size, with seconds if `priced` or the profile has them.

    F is a forward, B a whole backward and W its weight part.  "kept" has the bytes that a layer
    saves for its backward, "boundary" the bytes of values between it and the next layer.
    """
    measured = f", measured on {profile.measured_on}" if profile.measured_on else ", counted"
    threads = f" with {count_text(profile.threads, 'thread')}" if profile.measured_on else ""
    yield f"{profile.name}: {count_text(len(profile.layers), 'layer')}{measured}{threads}"
    for size in priced or profile.sizes:
        yield ""
        yield f"a micro-batch of {count_text(size.microbatch_size, 'sample')}:"
        yield from columns(list(_rows(profile, size, is_priced=bool(priced))), num_left=len(_HEAD))


def _rows(profile: Profile, size: AtSize, *, is_priced: bool) -> Iterator[tuple[str, ...]]:
    has_times = is_priced or profile.measured_on is not None
    spread = ("spread",) if has_times and not is_priced else ()
    yield (*_HEAD, *(_TIMES if has_times else ()), *spread, *_COUNTED)
    kept, boundaries = kept_bytes(size), boundary_bytes(size)
    for n, facts in enumerate(profile.layers):
        kind = size.layer(n)
        yield (
            facts.name,
            facts.kind,
            "yes" if kind.draws else "",
            *(_times(kind, has_spread=bool(spread)) if has_times else ()),
            *_counted(kind, kept[n], boundaries[n], profile.weights[n]),
        )
    if size.loss is not None and size.loss.operators:
        times = _times(size.loss, has_spread=bool(spread)) if has_times else ()
        none = LayerWeights(parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0)
        yield ("loss", "", "", *times, *_counted(size.loss, size.loss.inner_bytes, 0, none))


def _times(kind: LayerKind, *, has_spread: bool) -> tuple[str, ...]:
    times = kind.seconds
    if times is None:
        return ("-",) * (len(_TIMES) + has_spread)
    seconds = (times.forward_s, times.backward_s, times.weight_s, times.recompute_s)
    return (*map(time_text, seconds), *([percent_text(times.spread)] if has_spread else []))


def _counted(kind: LayerKind, kept: int, boundary: int, weights: LayerWeights) -> tuple[str, ...]:
    flops = sum(x.flops * x.count for x in kind.operators)
    sizes = (kept, boundary, weights.parameter_bytes)
    return (f"{flops / 1e9:.3g}", *(bytes_text(size) if size else "0" for size in sizes))


def kept_bytes(size: AtSize) -> list[int]:
    """Return the bytes that each layer saves for its backward, each storage once."""
    kept = []
    for n, places in enumerate(size.saved):
        storages = {size.values[p].storage: size.values[p].num_bytes for p in places}
        kept.append(size.layer(n).inner_bytes + sum(storages.values()))
    return kept


def boundary_bytes(size: AtSize) -> list[int]:
    """Return the bytes of values between each layer and the next one, each storage once."""
    crossing = []
    for n in range(len(size.kind_of)):
        across = {
            value.storage: value.num_bytes
            for value in size.values
            if value.producer <= n < max(value.consumers, default=-1) and not value.is_weight
        }
        crossing.append(sum(across.values()))
    return crossing
