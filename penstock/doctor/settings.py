"""Find settings that make a job hang or slow, and explain each in a line with its remedy.

`init_mesh` itself refuses wrong ranks, ports and versions, and names absent processes.
"""

import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .facts import RankFacts, quota_cores

Environment = Mapping[str, str]
"""Variables of the environment."""
Resolve = Callable[[str], Sequence[str]]
"""A function from a host's name to its addresses."""
_NVIDIA = Path("/proc/driver/nvidia/gpus")
"""A folder that exists if the driver sees GPUs."""


class Finding(NamedTuple):
    """One finding, as a line: an error if training could not work, else a warning."""

    is_error: bool
    text: str

    def __str__(self) -> str:
        return f"{'error' if self.is_error else 'warning'}: {self.text}"


def addresses_of(name: str) -> tuple[str, ...]:
    """Return the addresses of a host's name, in the order of their use."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in entries))


def check_network(
    environment: Environment, host: str, resolve: Resolve = addresses_of
) -> Iterator[Finding]:
    """Check that gloo and MASTER_ADDR reach other hosts, if the job has some."""
    # 1. The interface that gloo is told to use must be there.
    interfaces = [name for _, name in socket.if_nameindex()]
    wanted = environment.get("GLOO_SOCKET_IFNAME", "")
    absent = [name for name in wanted.split(",") if wanted and name not in interfaces]
    if absent:
        yield Finding(
            True,
            f"GLOO_SOCKET_IFNAME={wanted}: this machine has no network interface {absent[0]!r}. "
            f"Set it to one of {', '.join(interfaces)}, or unset it",
        )
    # torchrun tells if other processes of the job are on other hosts.
    here = environment.get("LOCAL_WORLD_SIZE", "")
    if not here.isdigit() or int(here) >= int(environment.get("WORLD_SIZE", "1")):
        return
    # 2. Across hosts, neither rank 0 nor gloo may be reached by a loopback address.
    address = environment.get("MASTER_ADDR", "")
    if _is_loopback(resolve(address)):
        yield Finding(
            True,
            f"MASTER_ADDR={address}: each host would look for rank 0 on itself. Give the address "
            "of the host of rank 0 as the others see it",
        )
    if not wanted and _is_loopback(local := resolve(host)):
        yield Finding(
            True,
            f"gloo on {host} would listen at {local[0]}: that is what the name of the machine "
            "stands for there, and the other hosts cannot reach it. Set GLOO_SOCKET_IFNAME to the "
            f"network interface between the hosts, one of {', '.join(interfaces)}, or correct "
            "the name's line in /etc/hosts",
        )


def _is_loopback(addresses: Sequence[str]) -> bool:
    return bool(addresses) and all(a.startswith("127.") or a == "::1" for a in addresses)


def check_together(
    ranks: Sequence[RankFacts], quota: float | None = None, nvidia: Path = _NVIDIA
) -> Iterator[Finding]:
    """Check that the cores suffice for the threads of all processes, and that torch sees the GPUs.

    `quota` is the container's limit of CPU time, in cores; default: the system's.
    """
    # 1. Processes on the same cores of a machine share them.
    quota = quota_cores() if quota is None else quota
    sharing: dict[tuple[str, tuple[int, ...]], list[RankFacts]] = defaultdict(list)
    for facts in ranks:
        sharing[facts.machine, facts.cores].append(facts)
    for (_, cores), here in sharing.items():
        threads, is_local = sum(facts.num_threads for facts in here), ranks[0] in here
        num_cores = min(len(cores), quota if quota is not None and is_local else len(cores))
        if threads > num_cores:
            fitting = int(num_cores) // len(here)
            names = ", ".join(str(facts.rank) for facts in here)
            yield Finding(
                False,
                f"rank{'s' if len(here) > 1 else ''} {names} on {here[0].host} run {threads} "
                f"threads on {num_cores:g} cores, and slow each other. "
                + (
                    f"Set OMP_NUM_THREADS={fitting}"
                    if fitting
                    else f"Start at most {max(1, int(num_cores))} processes on this host"
                ),
            )
    # 2. A machine with GPUs that torch does not see has the wrong build of torch.
    is_hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    if nvidia.is_dir() and not ranks[0].gpus and not is_hidden:
        yield Finding(
            False,
            f"this machine has NVIDIA GPUs that torch {ranks[0].torch}, built for "
            f"{ranks[0].torch_build}, does not see. Install a build that fits the driver",
        )
