"""Check the sizes of Transformers, given by name or one by one."""

from collections.abc import Mapping

from penstock.errors import ConfigError


def require_positive(**numbers: float) -> None:
    """Refuse the first of `numbers` that is not above 0.

    Raises:
        ConfigError: names the number and its value.
    """
    for name, value in numbers.items():
        if not value > 0:
            raise ConfigError(f"{name}={value!r}: give a number above 0")


def require_heads(width: int, num_heads: int) -> None:
    """Refuse a number of heads that does not divide the width.

    Raises:
        ConfigError: `num_heads` does not divide `width`.
    """
    if width % num_heads:
        raise ConfigError(
            f"width={width} cannot be shared out among num_heads={num_heads}; give a width that "
            f"is a multiple of {num_heads}, or a number of heads that divides {width}"
        )


def require_even(width: int) -> None:
    """Refuse an odd width: sinusoidal positions are pairs of a sine and a cosine.

    Raises:
        ConfigError: `width` is odd.
    """
    if width % 2:
        raise ConfigError(
            f"width={width} is odd, but positions are pairs of a sine and a cosine; "
            f"give an even width, such as {width + 1}"
        )


def sizes_of(
    size: str | None,
    known: Mapping[str, Mapping[str, int]],
    given: Mapping[str, int | None],
) -> dict[str, int]:
    """Return the sizes of a name, overridden by the given ones.

    Raises:
        ConfigError: the name is unknown, or there is no name and a size is missing.
    """
    if size is not None:
        require_one_of(tuple(known), size=size)
    named = known[size] if size is not None else {}
    sizes = {**named, **{name: value for name, value in given.items() if value is not None}}
    missing = [name for name in given if name not in sizes]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not given; give all of {', '.join(given)}, or a size, one of "
            + ", ".join(map(repr, known))
        )
    return sizes


def require_at_least(least: int, **sizes: int) -> None:
    """Refuse the first of `sizes` that is not an integer from `least` up.

    Raises:
        ConfigError: names the size, its value and the bound.
    """
    for name, value in sizes.items():
        if type(value) is not int or value < least:
            raise ConfigError(f"{name}={value!r}: give an integer from {least} up")


def require_share(**shares: float) -> None:
    """Refuse the first of `shares` that is not from 0 to below 1.

    Raises:
        ConfigError: names the share, its value and the bounds.
    """
    for name, value in shares.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name}={value!r}: give a share from 0 to below 1, such as 0.1")


def require_one_of(known: tuple[object, ...], **choices: object) -> None:
    """Refuse the first of `choices` that is not among `known`.

    Raises:
        ConfigError: names the choice, its value and the known ones.
    """
    for name, value in choices.items():
        if value not in known:
            listed = ", ".join(map(repr, known))
            raise ConfigError(f"{name}={value!r} is not known; choose one of {listed}")
