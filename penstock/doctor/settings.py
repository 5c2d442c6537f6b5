"""Settings that let a job hang or crawl, each explained in a line: what, why, what to change.

What `init_mesh` itself refuses in time (ranks, ports, versions, who does not come) is left to it.
"""

import os
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .facts import RankFacts, quota_cores

Environment = Mapping[str, str]
Resolve = Callable[[str], Sequence[str]]
_NVIDIA = Path("/proc/driver/nvidia/gpus")


class Finding(NamedTuple):
    """One thing in a line: with an error training could not work, otherwise slowly."""

    is_error: bool
    text: str

    def __str__(self) -> str:
        return f"{'error' if self.is_error else 'warning'}: {self.text}"


def addresses_of(name: str) -> tuple[str, ...]:
    """Return the addresses of a host's name, in the order in which they are tried."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def check_network(
    environment: Environment, host: str, resolve: Resolve = addresses_of
) -> Iterator[Finding]:
    """See that gloo and MASTER_ADDR lead to other hosts, where the job has some."""
    interfaces = [name for _, name in socket.if_nameindex()]
    wanted = environment.get("GLOO_SOCKET_IFNAME", "")
    absent = [name for name in wanted.split(",") if wanted and name not in interfaces]
    if absent:
        yield Finding(
            True,
            f"GLOO_SOCKET_IFNAME={wanted}: this machine has no network interface {absent[0]!r}. "
            f"Set it to one of {', '.join(interfaces)}, or unset it",
        )
    if not _has_other_hosts(environment):
        return
    address = environment.get("MASTER_ADDR", "")
    if _is_loopback(resolve(address)):
        yield Finding(
            True,
            f"MASTER_ADDR={address}: each host would look for rank 0 on itself. Give the address "
            "of the host of rank 0 as the others see it",
        )
    if not wanted and _is_loopback(own := resolve(host)):
        yield Finding(
            True,
            f"gloo on {host} would listen at {own[0]}: that is what the name of the machine "
            "stands for there, and the other hosts cannot reach it. Set GLOO_SOCKET_IFNAME to the "
            f"network interface between the hosts, one of {', '.join(interfaces)}, or correct "
            "the name's line in /etc/hosts",
        )


def _is_loopback(addresses: Sequence[str]) -> bool:
    return bool(addresses) and all(a.startswith("127.") or a == "::1" for a in addresses)


def _has_other_hosts(environment: Environment) -> bool:
    """Tell whether torchrun says that other processes of the job are on other hosts."""
    here = environment.get("LOCAL_WORLD_SIZE", "")
    return here.isdigit() and int(here) < int(environment.get("WORLD_SIZE", "1"))


def check_together(
    ranks: Sequence[RankFacts], quota: float | None = None, nvidia: Path = _NVIDIA
) -> Iterator[Finding]:
    """See that cores suffice for the threads of all processes, and that torch sees the GPUs.

    `quota` is how many cores' time the container of this process may use, default: as the system
    says.
    """
    quota = quota_cores() if quota is None else quota
    sharing: dict[tuple[str, tuple[int, ...]], list[RankFacts]] = defaultdict(list)
    for facts in ranks:
        sharing[facts.machine, facts.cores].append(facts)
    for (_, cores), here in sharing.items():
        threads, is_own = sum(facts.num_threads for facts in here), ranks[0] in here
        num_cores = min(len(cores), quota if quota is not None and is_own else len(cores))
        if threads > num_cores:
            fitting = int(num_cores) // len(here)
            yield Finding(
                False,
                f"{named([facts.rank for facts in here])} on {here[0].host} run {threads} threads "
                f"on {num_cores:g} cores, and slow each other. "
                + (
                    f"Set OMP_NUM_THREADS={fitting}"
                    if fitting
                    else f"Start at most {max(1, int(num_cores))} processes on this host"
                ),
            )
    is_hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    if nvidia.is_dir() and not ranks[0].gpus and not is_hidden:
        yield Finding(
            False,
            f"this machine has NVIDIA GPUs that torch {ranks[0].torch}, built for "
            f"{ranks[0].torch_build}, does not see. Install a build that fits the driver",
        )


def named(ranks: Sequence[int]) -> str:
    """Write "rank 1" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
