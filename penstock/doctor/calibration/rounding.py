"""Figures for a file: no more digits than a measurement has."""

_DIGITS = 4


def rounded(value: float) -> float:
    """Return a number with four significant digits."""
    return float(f"{value:.{_DIGITS}g}")
