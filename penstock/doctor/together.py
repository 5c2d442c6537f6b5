"""What shows only side by side: versions that differ, hosts that cannot reach each other, cores
that are shared by too many.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TypeVar

from .facts import RankFacts
from .finding import Finding, Severity, error, named, warning
from .host import is_loopback

_T = TypeVar("_T")
_MUST_AGREE = {"Python": "python", "torch": "torch", "Penstock": "penstock"}
_MUCH_S = 1.0
"""Clocks that are further apart are worth a warning."""


def check_together(ranks: Sequence[RankFacts]) -> list[Finding]:
    """Compare the processes of a job; with an error among the findings they make no mesh."""
    return [
        *_check_versions(ranks),
        *_check_addresses(ranks),
        *_check_cores(ranks),
        *_check_devices(ranks),
    ]


def _check_versions(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    for name, field in _MUST_AGREE.items():
        versions = _by(ranks, attrgetter(field))
        if len(versions) > 1:
            yield error(
                f"{name} is {_spelled(versions)}",
                "the processes exchange what one version writes and another one might not read",
                f"Install the same version of {name} on every host",
            )
    versions = _by(ranks, lambda facts: facts.safetensors)
    if len(versions) > 1:
        yield warning(
            f"safetensors is {_spelled(versions)}",
            "a checkpoint is written by all processes, and read by any",
            "Install the same version on every host",
        )


def _check_addresses(ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    if len({facts.network for facts in ranks}) == 1:
        return
    for address, who in _by(ranks, lambda facts: facts.address).items():
        if is_loopback(address):
            hosts = sorted({facts.host for facts in ranks if facts.rank in who})
            yield error(
                f"gloo on {named(who)} ({', '.join(hosts)}) would listen at {address}",
                "that is what the name of the machine stands for there, and the job has other "
                "hosts, which cannot reach it",
                "Set GLOO_SOCKET_IFNAME to the network interface between the hosts, or correct "
                "the name's line in /etc/hosts",
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


def check_clocks(clocks_s: Sequence[float]) -> Iterator[Finding]:
    """Compare the clocks of the ranks, in seconds after that of rank 0."""
    slow, fast = min(clocks_s), max(clocks_s)
    if fast - slow > _MUCH_S:
        yield warning(
            f"the clock of rank {list(clocks_s).index(fast)} is {fast - slow:.1f} s ahead of that "
            f"of rank {list(clocks_s).index(slow)}",
            "logs and file times of the hosts cannot be put side by side",
            "Let the hosts set their clocks over the network (chrony, systemd-timesyncd)",
        )


def _by(ranks: Sequence[RankFacts], key: Callable[[RankFacts], _T]) -> dict[_T, list[int]]:
    groups: dict[_T, list[int]] = defaultdict(list)
    for facts in ranks:
        groups[key(facts)].append(facts.rank)
    return dict(groups)


def _spelled(versions: dict[str, list[int]]) -> str:
    return ", ".join(f"{version} on {named(who)}" for version, who in versions.items())
