"""What torchrun calls this job, so that processes it starts again find what the job began."""

import os
import socket
from pathlib import Path

_NO_NAME = "none"
"""What torchrun calls a job whose --rdzv-id is not given."""


def job_name() -> str | None:
    """Return a name that all attempts of one torchrun job have in common; None without torchrun.

    It is the job's --rdzv-id; without one, torchrun's own process, which outlives its attempts.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None or name != _NO_NAME:
        return name
    return f"{socket.gethostname()}:{os.getppid()}:{_start_of(os.getppid())}"


def _start_of(process: int) -> str:
    """Tell when a process began, in clock ticks since the host started; "" if nobody knows."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]
