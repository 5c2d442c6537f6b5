"""Check what a process is started with: its place among others, and how long it may wait."""

import math
import os
from collections.abc import Sequence
from numbers import Real
from typing import Any

from penstock.errors import ConfigError
from penstock.types import LONGEST_TIMEOUT_S

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_REMEDY = (
    "torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together; start the job with it, "
    "or unset all four to run in a single process"
)


def num_processes() -> int:
    """Count the processes that torchrun, or whoever set its variables, started; 1 without.

    Raises:
        ConfigError: WORLD_SIZE is no number of processes.
    """
    return _whole_number("WORLD_SIZE", "1", 1)


def process_rank() -> int:
    """Return this process's number among them.

    Raises:
        ConfigError: RANK is no number of one of them.
    """
    rank, count = _whole_number("RANK", "0", 0), num_processes()
    if rank >= count:
        raise ConfigError(
            f"RANK={rank} with WORLD_SIZE={count}: ranks count from 0, so the last one is "
            f"{count - 1}. {_REMEDY}"
        )
    return rank


def meeting_place() -> tuple[str, int]:
    """Return address and port where the processes meet.

    Raises:
        ConfigError: a variable that says so is not set, or is no port.
    """
    absent = [name for name in _NEEDED if not os.environ.get(name)]
    if absent:
        raise ConfigError(
            f"WORLD_SIZE={num_processes()} says that this is one of several processes, but "
            f"{_listed(absent)} not set: they cannot find each other. {_REMEDY}"
        )
    return os.environ["MASTER_ADDR"], _whole_number("MASTER_PORT", "", 1)


def check_timeout(timeout_s: Any) -> float:
    """Return `timeout_s` if it is a time that every kind of wait can be given.

    Raises:
        ConfigError: it is no number of seconds above 0, or more than a year.
    """
    is_number = isinstance(timeout_s, Real) and not isinstance(timeout_s, bool)
    if not is_number or not math.isfinite(timeout_s) or not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        raise ConfigError(
            f"timeout_s={timeout_s!r}; it must be a number of seconds above 0 and at most "
            f"{LONGEST_TIMEOUT_S:,.0f} (a year). A host or a process that is lost is noticed "
            "within seconds, however long a wait may last"
        )
    return float(timeout_s)


def _whole_number(name: str, default: str, least: int) -> int:
    text = os.environ.get(name, default)
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigError(
            f"{name}={text} in the environment; it must be a whole number of at least {least}. "
            f"{_REMEDY}"
        )
    return number


def _listed(names: Sequence[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"
