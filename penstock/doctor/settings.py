"""Wrong settings, explained: functions from environment variables and a machine to findings; and
what shows only side by side: cores that are shared by too many, versions of files that differ.

What makes it impossible to meet is found before, by each process itself, so that it is said in
place of a wait that ends by its deadline; what `init_mesh` compares is not compared here.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .facts import Host, RankFacts, is_loopback
from .finding import Finding, Severity, error, named, warning

Environment = Mapping[str, str]

_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NUMBERS = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 1}
"""Variables that must be whole numbers, with the least each may be."""
_TORCHRUN = "Start all processes with torchrun, which sets them"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands in its job, and where the job meets."""

    rank: int
    world_size: int
    address: str
    port: int
    keeps_store: bool
    """Whether this process keeps the place where all meet, rather than torchrun."""


def check_start(environment: Environment) -> list[Finding]:
    """See that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT fit together."""
    broken = list(_not_numbers(environment))
    return broken or [*_partly_set(environment), *_out_of_range(environment)]


def read_place(environment: Environment) -> Place | None:
    """Read where this process stands; None if it runs alone.  For what `check_start` passed."""
    world_size = int(environment.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return None
    rank = int(environment["RANK"])
    by_torchrun = environment.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    return Place(
        rank,
        world_size,
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        keeps_store=rank == 0 and not by_torchrun,
    )


def check_place(place: Place, environment: Environment, host: Host) -> Iterator[Finding]:
    """See that the job can meet at MASTER_ADDR and MASTER_PORT."""
    addresses = host.resolve(place.address)
    what = f"MASTER_ADDR={place.address}"
    if not addresses:
        yield error(
            what,
            "this name has no address here",
            "Give the IP address of the host of rank 0, or put the name into DNS or /etc/hosts",
        )
        return
    if _has_other_hosts(environment) and all(map(is_loopback, addresses)):
        yield error(
            what,
            f"{environment['LOCAL_WORLD_SIZE']} of {place.world_size} processes are on this host, "
            "and each host would look for rank 0 on itself",
            "Give the address of the host of rank 0 as the others see it",
        )
    if not place.keeps_store:
        return
    if not any(map(host.is_own, addresses)):
        yield warning(
            what,
            f"rank 0 waits for the others on this host, which does not have the address "
            f"{addresses[0]}; that works only where the network translates it",
            "Give an address of the host of rank 0",
        )
    if not host.can_listen(place.port):
        yield error(
            f"MASTER_PORT={place.port}",
            "rank 0 cannot listen on this port: another job or a second process with RANK=0 has "
            "it, or it needs rights",
            "End the other process, or choose a free port above 1023 for all ranks",
        )


def check_gloo(environment: Environment, host: Host) -> Iterator[Finding]:
    """See that gloo, which carries all messages, finds an address of this machine."""
    wanted = environment.get("GLOO_SOCKET_IFNAME", "")
    if wanted:
        yield from _check_interfaces(wanted, host)
        return
    addresses = host.resolve(host.name)
    address = gloo_address(environment, host)
    if is_loopback(address) and _has_other_hosts(environment):
        yield error(
            f"gloo on {host.name} would listen at {address}",
            "that is what the name of the machine stands for there, and the job has other hosts, "
            "which cannot reach it",
            f"Set GLOO_SOCKET_IFNAME to the network interface between the hosts, one of "
            f"{_known(host)}, or correct the name's line in /etc/hosts",
        )
    elif not any(map(host.is_own, addresses)):
        found = f"has the address {addresses[0]}" if addresses else "has no address"
        yield warning(
            f"the name of this machine, {host.name!r}, {found}",
            "that is none of its own, so gloo takes 127.0.0.1, which other hosts cannot reach",
            f"Put the name into /etc/hosts, or set GLOO_SOCKET_IFNAME to one of {_known(host)}",
        )


def gloo_address(environment: Environment, host: Host) -> str:
    """Return the address at which gloo lets the other processes connect to this one."""
    wanted = environment.get("GLOO_SOCKET_IFNAME", "")
    if wanted:
        return host.interfaces.get(wanted.split(",")[0]) or ""
    own = [address for address in host.resolve(host.name) if host.is_own(address)]
    return own[0] if own else "127.0.0.1"


def _has_other_hosts(environment: Environment) -> bool:
    """Tell whether torchrun says that other processes of the job are on other hosts."""
    here = environment.get("LOCAL_WORLD_SIZE", "")
    return here.isdigit() and int(here) < int(environment.get("WORLD_SIZE", "1"))


def check_threads(environment: Environment, host: Host) -> Iterator[Finding]:
    """See that the number of threads can be read, and that the container leaves cores for them."""
    threads = environment.get("OMP_NUM_THREADS")
    if threads is not None and (not threads.isdigit() or int(threads) == 0):
        yield warning(
            f"OMP_NUM_THREADS={threads}",
            "it is no whole number of at least 1, so each process uses every core",
            f"Set it to the cores divided by the processes of a host; there are {host.num_cores}",
        )
    if host.quota_cores is not None and host.quota_cores < host.num_cores:
        cores = max(1, int(host.quota_cores))
        yield warning(
            f"a quota of {host.quota_cores:g} cores",
            f"{host.num_cores} are visible: that many threads would run, and stop when the quota "
            "is used up",
            f"Set OMP_NUM_THREADS so that all processes together use {cores}, and give "
            "Pipeline(threads_per_stage=...)",
        )


def _not_numbers(environment: Environment) -> Iterator[Finding]:
    for name, least in _NUMBERS.items():
        text = environment.get(name)
        if text is None:
            continue
        try:
            good = int(text) >= least
        except ValueError:
            good = False
        if not good:
            yield error(
                f"{name}={text}",
                f"it must be a whole number of at least {least}",
                f"{_TORCHRUN}, or correct it",
            )


def _partly_set(environment: Environment) -> Iterator[Finding]:
    present = [name for name in _PLACE if environment.get(name)]
    absent = [name for name in _PLACE if name not in present]
    if not present or not absent or environment.get("WORLD_SIZE") == "1":
        return
    have = "is" if len(absent) == 1 else "are"
    what = f"{_listed(present)} set, but {_listed(absent)} {have} not"
    if "WORLD_SIZE" in present:
        yield error(what, "the processes cannot find each other", _TORCHRUN)
    elif "RANK" in present:
        why = "without WORLD_SIZE each process takes itself for the only one, and trains alone"
        yield error(what, why, _TORCHRUN)
    else:
        yield warning(
            what, "this process runs alone", f"{_TORCHRUN}, unless it is meant to run alone"
        )


def _out_of_range(environment: Environment) -> Iterator[Finding]:
    rank, world_size = environment.get("RANK"), environment.get("WORLD_SIZE")
    if rank is not None and world_size is not None and int(rank) >= int(world_size):
        yield error(
            f"RANK={rank} with WORLD_SIZE={world_size}",
            f"ranks count from 0, so the last one is {int(world_size) - 1}",
            f"{_TORCHRUN}, or correct one of the two",
        )
    port = environment.get("MASTER_PORT")
    if port is not None and int(port) > 65535:
        yield error(
            f"MASTER_PORT={port}", "ports end at 65535", "Choose a free one, such as 29500"
        )


def _check_interfaces(wanted: str, host: Host) -> Iterator[Finding]:
    for name in wanted.split(","):
        what = f"GLOO_SOCKET_IFNAME={wanted}"
        if name not in host.interfaces:
            yield error(
                what,
                f"this machine has no network interface {name!r}",
                f"Set it to one of {_known(host)}, or unset it",
            )
        elif host.interfaces[name] is None:
            yield warning(
                what,
                f"the network interface {name!r} has no IPv4 address",
                f"Bring it up, or set GLOO_SOCKET_IFNAME to one of {_known(host)}",
            )


def _known(host: Host) -> str:
    return ", ".join(
        f"{name} ({address})" if address else name for name, address in host.interfaces.items()
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


_T = TypeVar("_T")


def check_together(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Compare the processes of a job, beyond what they must have in common to make a mesh."""
    return [*_check_versions(ranks), *_check_cores(ranks), *_check_devices(ranks)]


def _check_versions(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    versions = _by(ranks, lambda facts: facts.safetensors)
    if len(versions) > 1:
        said = (f"{version} on {named(who)}" for version, who in versions.items())
        yield warning(
            f"safetensors is {', '.join(said)}",
            "a checkpoint is written by all processes, and read by any",
            "Install the same version on every host",
        )


def _check_cores(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for (_, cores), who in _by(ranks, lambda facts: (facts.machine, facts.cores)).items():
        here = [facts for facts in ranks if facts.rank in who]
        threads = sum(facts.num_threads for facts in here)
        if threads <= len(cores):
            continue
        hosts = ", ".join(sorted({facts.host for facts in here}))
        fitting = len(cores) // len(here)
        yield warning(
            f"{named(who)} on {hosts} run {threads} threads on {len(cores)} cores",
            "threads that share a core slow each other, and the slowest stage sets the pace",
            f"Set OMP_NUM_THREADS={fitting}"
            if fitting
            else f"Start at most {len(cores)} processes on this host",
        )


def _check_devices(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    having = [facts.rank for facts in ranks if facts.gpus]
    if having and len(ranks) > 1:
        yield Finding(
            severity=Severity.INFO,
            what=f"{named(having)} of {len(ranks)} have GPUs",
            why="several processes compute on CPUs unless they are told otherwise",
            change='Give init_mesh(device="cuda"), or start one process, without torchrun',
        )


def _by(ranks: Sequence[RankFacts], key: Callable[[RankFacts], _T]) -> dict[_T, list[int]]:
    groups: dict[_T, list[int]] = defaultdict(list)
    for facts in ranks:
        groups[key(facts)].append(facts.rank)
    return dict(groups)
