"""Sizes that a builder is given, looked at before anything is made."""

from collections.abc import Iterable, Mapping

from penstock.errors import ConfigError


def check_counts(builder: str, **counts: int) -> None:
    """Refuse what is not a whole number of at least 1.

    Raises:
        ConfigError: names the first such argument, with its value.
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{builder}: {name}={value!r} counts something; give a whole number of at least 1"
            )


def check_rates(builder: str, **rates: float) -> None:
    """Refuse a share of values to drop that leaves nothing, or is no share.

    Raises:
        ConfigError: names the first such argument, with its value.
    """
    for name, value in rates.items():
        if not 0 <= value < 1:
            raise ConfigError(
                f"{builder}: {name}={value!r} is the share of values that are dropped; "
                "give a number from 0 up to, but not including, 1"
            )


def check_positive(builder: str, **numbers: float) -> None:
    """Refuse what is not above 0.

    Raises:
        ConfigError: names the first such argument, with its value.
    """
    for name, value in numbers.items():
        if not value > 0:
            raise ConfigError(f"{builder}: {name}={value!r}; give a number above 0")


def check_heads(builder: str, width: int, num_heads: int) -> None:
    """Refuse heads that cannot share out the channels evenly.

    Raises:
        ConfigError: `num_heads` does not divide `width`.
    """
    if width % num_heads:
        raise ConfigError(
            f"{builder}: width={width} cannot be shared out among num_heads={num_heads}; "
            f"give a width that is a multiple of {num_heads}, or a number of heads that divides "
            f"{width}"
        )


def check_even(builder: str, width: int) -> None:
    """Refuse a width without a cosine for each sine of the positions.

    Raises:
        ConfigError: `width` is odd.
    """
    if width % 2:
        raise ConfigError(
            f"{builder}: width={width} is odd, but positions are pairs of a sine and a cosine; "
            f"give an even width, such as {width + 1}"
        )


def sizes_of(
    builder: str,
    size: str | None,
    known: Mapping[str, Mapping[str, int]],
    given: Mapping[str, int | None],
) -> dict[str, int]:
    """Give the sizes that a name stands for, each replaced by the one given, if there is one.

    Raises:
        ConfigError: nobody knows the name; without a name, one of the sizes is not given.
    """
    if size is not None and size not in known:
        raise ConfigError(f"{builder}: no size is called {size!r}; choose {_words(known)}")
    named = known[size] if size is not None else {}
    found = {**named, **{name: value for name, value in given.items() if value is not None}}
    missing = [name for name in given if name not in found]
    if missing:
        raise ConfigError(
            f"{builder}: {', '.join(missing)} not given; give all of {', '.join(given)}, "
            f"or a size: {_words(known)}"
        )
    return found


def _words(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
