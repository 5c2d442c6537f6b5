"""Sizes of a network, checked before anything of it is made."""

from penstock.errors import ConfigError


def require_at_least(least: int, **sizes: int) -> None:
    """Refuse the first of `sizes` that is no integer, or is below `least`.

    Raises:
        ConfigError: names the size, its value and what it must be.
    """
    for name, value in sizes.items():
        if type(value) is not int or value < least:
            raise ConfigError(f"{name}={value!r}: give an integer from {least} up")


def require_share(**shares: float) -> None:
    """Refuse the first of `shares` that is not from 0 to below 1.

    Raises:
        ConfigError: names the share, its value and what it must be.
    """
    for name, value in shares.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name}={value!r}: give a share from 0 to below 1, such as 0.1")


def require_one_of(known: tuple[object, ...], **choices: object) -> None:
    """Refuse the first of `choices` that is not among `known`.

    Raises:
        ConfigError: names the choice, its value and what there is.
    """
    for name, value in choices.items():
        if value not in known:
            listed = ", ".join(map(repr, known))
            raise ConfigError(f"{name}={value!r} is not known; choose one of {listed}")
