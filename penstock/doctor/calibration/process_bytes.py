"""What a process takes of this host's memory before it has a model: code, and its own data."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from penstock.errors import MeshError

_STATUS = Path("/proc/self/status")
_TIMEOUT_S = 60.0


def resident_bytes(name: str = "VmRSS") -> int | None:
    """Return what this process has in memory, or with "VmHWM" the most that it ever had; None
    where the system does not tell.
    """
    lines = _STATUS.read_text().splitlines() if _STATUS.exists() else []
    sizes = (int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
    return next(sizes, None)


def measure_process_bytes() -> int | None:
    """Measure a process of its own; None where the system does not tell.

    Raises:
        MeshError: it failed, or took too long.
    """
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    return int(run_apart(command, "a process of this host", _TIMEOUT_S)) or None


def run_apart(
    command: Sequence[str],
    who: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command, and return what it wrote.

    Raises:
        MeshError: it failed, or took too long.
    """
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except subprocess.TimeoutExpired:
        raise MeshError(
            f"{who} took more than {timeout_s:.0f} s to be measured: the machine is busy with "
            "other work. Stop that, and calibrate again"
        ) from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no word was written"]
        raise MeshError(f"{who} could not be measured: {lines[-1]}") from None
    return done.stdout


def main() -> None:
    """Load what a pipeline uses, run a small operator of each kind; write what that takes."""
    import penstock.pipeline  # noqa: F401 - only here: it is what is measured

    torch.set_num_threads(1)
    image = torch.ones(1, 8, 8, 8, requires_grad=True)
    for layer in (torch.nn.Linear(8, 8), torch.nn.Conv2d(8, 8, 3)):
        y = layer(image)
        torch.autograd.grad(y, [image, *layer.parameters()], torch.ones_like(y))
    sys.stdout.write(str(resident_bytes() or 0))
