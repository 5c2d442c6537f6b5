"""Check what a process is started with: its place among others, and how long it may wait."""

import os
from collections.abc import Sequence

from penstock.errors import ConfigError

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


def local_rank() -> int:
    """Return this process's number among those on its host.

    Raises:
        ConfigError: LOCAL_RANK is no number.
    """
    return _whole_number("LOCAL_RANK", "0", 0)


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
