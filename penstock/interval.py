"""A number that is not known exactly: it lies between two ends; and descriptions of hardware with
numbers in the place of such, the slowest, the fastest or the likely of what may be.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Interval:
    """A number between `low` and `high`, both included.

    Raises:
        ConfigError: the ends are in the wrong order.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError(
                f"[{self.low}, {self.high}] is no interval: give the lower end first"
            )

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


Quantity = float | Interval
"""A number, or what is known of it."""


def least(quantity: Quantity) -> float:
    """Return the lower end of what is known."""
    return quantity.low if isinstance(quantity, Interval) else quantity


def most(quantity: Quantity) -> float:
    """Return the higher end of what is known."""
    return quantity.high if isinstance(quantity, Interval) else quantity


def likely(quantity: Quantity) -> float:
    """Return the middle of what is known."""
    return quantity.middle if isinstance(quantity, Interval) else quantity


_LESS_IS_FASTER = ("elementwise_fusion",)


def resolved(value: Any, choose: Callable[[Quantity], float]) -> Any:
    """Return a description of hardware with numbers in the place of intervals.

    With `least`, those with which everything takes least, and with `most`, those with which it
    takes most: of rates and shares the other end.
    """
    opposite = opposite_of(choose)
    return _chosen(value, lambda name, x: (choose if _is_better_small(name) else opposite)(x))


def opposite_of(choose: Callable[[Quantity], float]) -> Callable[[Quantity], float]:
    """Return what picks of a rate where `choose` picks of a time."""
    if choose is least:
        return most
    return least if choose is most else choose


def has_intervals(value: Any) -> bool:
    """Say whether there is an interval anywhere in a dataclass."""
    if isinstance(value, Interval):
        return True
    if isinstance(value, Mapping):
        return any(map(has_intervals, value.values()))
    if isinstance(value, tuple):
        return any(map(has_intervals, value))
    return is_dataclass(value) and any(
        has_intervals(getattr(value, field.name)) for field in fields(value)
    )


def _chosen(value: Any, choose: Callable[[str, Interval], float], name: str = "") -> Any:
    if isinstance(value, Interval):
        return choose(name, value)
    if isinstance(value, Mapping):
        return {key: _chosen(part, choose, name) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_chosen(part, choose, name) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {x.name: _chosen(getattr(value, x.name), choose, x.name) for x in fields(value)}
        return replace(value, **parts)
    return value


def _is_better_small(name: str) -> bool:
    return name in _LESS_IS_FASTER or (name.endswith("_s") and not name.endswith("_per_s"))
