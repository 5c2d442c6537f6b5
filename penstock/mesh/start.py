"""Read a process's place and device from its environment, and choose torch's backends.

Agreements go by gloo, tensors on a device by the device's own backend.
"""

import os

import torch
import torch.distributed as dist

from penstock.errors import ConfigError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of the environment that every launcher of torch sets."""
_REMEDY = (
    "torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT together; start the job with it, "
    "or unset all four to run in a single process"
)


def num_processes() -> int:
    """Return WORLD_SIZE, or 1 without a launcher; ConfigError if it is no number of processes."""
    return _whole_number("WORLD_SIZE", "1", 1)


def process_rank() -> int:
    """Return RANK, this process's number; ConfigError if it is no number below WORLD_SIZE."""
    rank, count = _whole_number("RANK", "0", 0), num_processes()
    if rank >= count:
        raise ConfigError(
            f"RANK={rank} with WORLD_SIZE={count}: ranks count from 0, so the last one is "
            f"{count - 1}. {_REMEDY}"
        )
    return rank


def meeting_place() -> tuple[str, int]:
    """Return the rendezvous' address and port; ConfigError if a variable is not set, or wrong."""
    absent = [name for name in _NEEDED if not os.environ.get(name)]
    if absent:
        raise ConfigError(
            f"WORLD_SIZE={num_processes()} says that this is one of several processes, but "
            f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not set: they cannot "
            f"find each other. {_REMEDY}"
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


def accelerators() -> tuple[str, ...]:
    """Return the names of the accelerators that this process sees and computes on by default.

    MPS computes only where it is named: no stage ever ran on it.
    """
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type == "mps":
        return ()
    return tuple(f"{here.type}:{n}" for n in range(torch.accelerator.device_count()))


def device_by_default() -> str:
    """Return the kind of device of a process among several: an accelerator, if torch.distributed
    has a backend for it, else the CPU.

    A ConfigError refuses more processes on this host than it has accelerators.
    """
    names = accelerators()
    if not names or not _backend_of(kind := names[0].partition(":")[0]):
        return "cpu"
    processes = _whole_number("LOCAL_WORLD_SIZE", "1", 1)
    if processes > len(names):
        raise ConfigError(
            f"{processes} processes on this host, and it has {len(names)} devices of kind "
            f"{kind}; start {len(names)}, or say where they compute: "
            f'init_mesh(device="{kind}") lets several share a device, init_mesh(device="cpu") '
            "takes the CPU"
        )
    return kind


def _backend_of(kind: str) -> str:
    """Return torch's backend for tensors on a kind of device, if it can be used here."""
    try:
        name = dist.get_default_backend_for_device(kind)
    except ValueError:
        return ""
    return name if dist.is_backend_available(name) else ""


def process_device(asked: torch.device | str) -> torch.device:
    """Return this process's device (of a kind, that of its number), or raise ConfigError."""
    device = torch.device(asked)
    if device.type == "cpu":
        return device
    here = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count() if here and here.type == device.type else 0
    index = (
        _whole_number("LOCAL_RANK", "0", 0) % max(1, count)
        if device.index is None
        else device.index
    )
    if index >= count:
        raise ConfigError(
            f"device={str(asked)!r}: this process sees {count} devices of that kind; name one "
            'that is there, or device="cpu"'
        )
    return torch.device(device.type, index)


def check_backends(asked: torch.device | str) -> str:
    """Return torch's backends for a device; ConfigError if torch lacks one, or runs without."""
    # Agreements need gloo on the CPU; tensors need the backend of their device.
    kind = torch.device(asked).type
    if dist.is_initialized():
        met: str = dist.get_backend_config()
        kinds = {pair.partition(":")[0] for pair in met.split(",")}
        if absent := [needed for needed in ("cpu", kind) if needed not in kinds]:
            raise ConfigError(
                f"torch.distributed was initialized with {met}, which has no backend for "
                f"{' and '.join(dict.fromkeys(absent))}. Initialize it with cpu:gloo and the "
                "backend of your device, or let init_mesh do so"
            )
        return met
    if kind == "cpu":
        return "gloo"
    name = _backend_of(kind)
    if not name:
        raise ConfigError(
            f"device={str(asked)!r}: processes that compute there need a backend of "
            f"torch.distributed for it, and torch {torch.__version__} has none. Install a torch "
            'that has one, give device="cpu", or use one process (no torchrun), where each '
            "stage has a thread"
        )
    return f"cpu:gloo,{kind}:{name}"
