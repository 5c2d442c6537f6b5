"""Two profiles of one model side by side, such as what was foretold and what was measured."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from penstock.trace.table import columns
from penstock.trace.units import time_text

from .device import Device
from .prices import LayerPrice, prices
from .profile import Profile

_PARTS = ("forward_s", "backward_s", "weight_s")
_WORDS = ("F", "B", "W")


@dataclass(frozen=True, slots=True)
class Pair:
    """What a layer costs by two profiles."""

    name: str
    one: LayerPrice
    other: LayerPrice

    def ratio(self, part: str = "") -> float | None:
        """Return how often the second one's seconds the first one has, of one part or of forward
        and backward together; None where the second one has none.
        """
        one, other = (_seconds(price, part) for price in (self.one, self.other))
        return one / other if other else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two profiles of one model, layer by layer, for a micro-batch of one size.

    `print(comparison)` is a table: seconds of both and their ratios.
    """

    one: str
    other: str
    microbatch_size: int
    layers: tuple[Pair, ...]
    whole: Pair

    @property
    def median_error(self) -> float:
        """By what share the layers' seconds differ, in the middle."""
        ratios = [ratio for pair in self.layers if (ratio := pair.ratio()) is not None]
        return median(abs(ratio - 1) for ratio in ratios) if ratios else 0.0

    def __str__(self) -> str:
        samples = f"a micro-batch of {self.microbatch_size}"
        return "\n".join(
            (
                f"{self.one} (1) and {self.other} (2), for {samples}:",
                *columns(list(self._rows()), num_left=1),
                f"forward and backward of a layer differ by {self.median_error:.1%} in the middle",
            )
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        yield ("layer", *(f"{w} {x}" for w in _WORDS for x in ("1", "2", "ratio")), "F+B ratio")
        for pair in (*self.layers, self.whole):
            cells = []
            for part in _PARTS:
                cells += [time_text(_seconds(p, part)) for p in (pair.one, pair.other)]
                cells.append(_text(pair.ratio(part)))
            yield (pair.name, *cells, _text(pair.ratio()))


def compare(one: Profile, other: Profile, device: Device | None = None) -> Comparison:
    """Compare two profiles at the least micro-batch size of the first, priced at it.

    Raises:
        ConfigError: they are of different models, or one was only counted and there is no device.
    """
    one.check_model(other.layers)
    size = one.sizes[0].microbatch_size
    found = [
        prices(each, None if each.measured_on is not None else device, size)
        for each in (one, other)
    ]
    names = [layer.name for layer in one.layers]
    pairs = tuple(map(Pair, names, found[0].layers, found[1].layers))
    sums = [
        LayerPrice(**{p: sum(getattr(layer, p) for layer in each.layers) for p in _PARTS})
        for each in found
    ]
    titles = [_title(each, device) for each in (one, other)]
    return Comparison(titles[0], titles[1], size, pairs, Pair("all", *sums))


def _title(profile: Profile, device: Device | None) -> str:
    if profile.measured_on is not None:
        return f"measured on {profile.measured_on}"
    assert device is not None
    return f"counted for {device.name}"


def _seconds(price: LayerPrice, part: str) -> float:
    if not part:
        return price.forward_s + price.backward_s
    seconds: float = getattr(price, part)
    return seconds


def _text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
