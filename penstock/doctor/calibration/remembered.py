"""Keep calibrations in files, so that a machine is measured once.

A file has a cluster, as TOML.  Its name is a digest of the facts on which the figures depend, and
its comment has these facts.
"""

import json
import os
import platform
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch

from penstock.costs.cluster import Cluster
from penstock.doctor.facts import memory_bytes, package_version, processor_name
from penstock.errors import ConfigError
from penstock.trace.progress import say

from .calibrate import Calibration, calibrate, num_usable_cores
from .figures import comment_of

QUICK_S = 4.0
"""Seconds of a calibration before a job starts, about, without the start of two processes."""
_FORMAT = 2
"""Version of the files; a change makes all of them obsolete."""
_MEASURED: dict[str, Cluster] = {}
"""Calibrations of this process by their facts, for folders that cannot be written."""


def remembered(num_processes: int = 1, *, renew: bool = False) -> Cluster:
    """Return this machine as a cluster: what was kept of it, or else measured now and kept.

    A file that cannot be read is ignored with a warning, and one that cannot be written as well.
    Figures that were measured beside other programs, or whose repeats are far apart, serve this
    process only, and say so.

    Args:
        num_processes: the processes of the job that asks.
        renew: measure in any case, and replace what was kept.
    """
    facts = facts_of(num_processes)
    cluster = None if renew else _MEASURED.get(facts) or _read(facts)
    if cluster is None:
        say(f"measuring this machine for about 10 s; {path_of(facts)} will keep the figures")
        found = calibrate(QUICK_S)
        if not found.is_worth_keeping:
            say(f"the figures are not kept: {found.warning}")
        cluster = keep(found, num_processes) if found.is_worth_keeping else found.cluster
    _MEASURED[facts] = cluster
    return cluster


def keep(calibration: Calibration, num_processes: int = 1) -> Cluster:
    """Write a calibration of this machine for later jobs of so many processes; return its cluster.

    The file is replaced at once, so that another process reads the old or the new one.  A warning
    says if it cannot be written.
    """
    facts, cluster = facts_of(num_processes), calibration.cluster
    path = path_of(facts)
    _MEASURED[facts] = cluster
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(path) as new:
            cluster.save(new, f"{comment_of(calibration)}\n\n{facts}")
    except OSError as error:
        warnings.warn(
            f"{path}: the calibration of this machine cannot be kept there: {error.strerror}. "
            "The next job measures again; set XDG_CACHE_HOME to a folder that can be written",
            stacklevel=2,
        )
    return cluster


def facts_of(num_processes: int) -> str:
    """Return one line of JSON with all that the figures of a calibration depend on."""
    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    facts = {
        "format": _FORMAT,
        "penstock": package_version(),
        "torch": torch.__version__,
        "gpus": gpus,
        "processor": processor_name() or platform.machine(),
        "cores": num_usable_cores(),
        "memory_bytes": memory_bytes(),
        "threads": torch.get_num_threads(),
        "processes": num_processes,
    }
    return json.dumps(facts)


def path_of(facts: str) -> Path:
    """Return the file for these facts, in the user's folder for caches."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative path counts as none
    digest = sha256(facts.encode()).hexdigest()[:16]
    home = given if given.is_absolute() else Path("~/.cache").expanduser()
    return home / "penstock" / "calibrations" / f"{digest}.toml"


def _read(facts: str) -> Cluster | None:
    """Return the kept cluster; None if there is no file, or with a warning if it is damaged."""
    path = path_of(facts)
    try:
        text = path.read_text(encoding="utf-8")
        if f"# {facts}" not in text.splitlines():
            raise ConfigError("it is not of this machine, or of other versions")
        return Cluster.from_toml(text)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        warnings.warn(
            f"{path}: it has no calibration of this machine, which is measured again: {error}",
            stacklevel=3,
        )
        return None


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a new file beside `path`, which takes its place at the end of the block."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(handle)
    new = Path(name)
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
