"""A number that is not known exactly: it lies between two ends."""

from dataclasses import dataclass

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
