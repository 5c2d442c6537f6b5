"""Check a cluster; errors name a field as a file does: `hosts[0].port`."""

import math
from collections.abc import Iterable, Iterator, Mapping

from .hosts import Host, Link

MOST_DEVICES = 1 << 20
"""Most devices of a cluster."""
_LINKS_OF_HOSTS = ("port", "processes", "uplink", "network")


def wrong_in_cluster(
    devices: Iterable[str], hosts: tuple[Host, ...], links: Mapping[str, Link]
) -> Iterator[str]:
    """Yield the faults of a cluster, in the order of its parts."""
    for what, entries in (("devices", list(devices)), ("hosts", hosts)):
        if not entries:
            yield f"{what} is empty; describe at least one"
    for name, link in links.items():
        where = f"links.{name}"
        rates = ("bytes_per_s", "collective_bytes_per_s", "sum_bytes_per_s", "copy_bytes_per_s")
        yield from _wrong_numbers(where, link, rates, above_zero=True)
        others = ("latency_s", "overhead_s", "collective_s", "half_rate_bytes")
        yield from _wrong_numbers(where, link, others)
    num_hosts = sum(host.count for host in hosts)
    for n, host in enumerate(hosts):
        where = f"hosts[{n}]"
        yield from _wrong_names(where, host, set(devices), links)
        yield from _wrong_figures(where, host)
        yield from _wrong_groups(where, host)
        yield from _wrong_links_between(where, host, num_hosts)
    yield from _wrong_together(hosts)


def _wrong_names(
    where: str, host: Host, devices: set[str], links: Mapping[str, Link]
) -> Iterator[str]:
    if not host.devices:
        yield f"{where}.devices is empty; name the kind of each device of the host"
    for n, kind in enumerate(host.devices):
        if kind not in devices:
            yield _unknown(f"{where}.devices[{n}]", kind, "devices", devices)
    for name in _LINKS_OF_HOSTS:
        link = getattr(host, name)
        if link is not None and link not in links:
            yield _unknown(f"{where}.{name}", link, "links", links)


def _wrong_figures(where: str, host: Host) -> Iterator[str]:
    for name in ("count", "cards"):
        if getattr(host, name) < 1:
            yield f"{where}.{name} is {getattr(host, name)}; give a whole number from 1"
    yield from _wrong_numbers(where, host, ("memory_bytes",), above_zero=True)
    for n, share in enumerate(host.busy_speed):
        if not 0 < share <= 1:
            yield (
                f"{where}.busy_speed[{n}] is {share}; give the share of what one reaches alone, "
                "above 0 and at most 1"
            )


def _wrong_groups(where: str, host: Host) -> Iterator[str]:
    numbers = [number for group in host.groups for number in group]
    last = len(host.devices) - 1
    for n, group in enumerate(host.groups):
        if not group:
            yield f"{where}.groups[{n}] is empty; name the numbers of its devices"
        for number in group:
            if not 0 <= number <= last:
                yield f"{where}.groups[{n}] names device {number}; they are 0 to {last}"
            if numbers.count(number) > 1:
                yield f"{where}.groups has device {number} twice; put each into one group"
    left = sorted({*range(last + 1)} - {*numbers}) if host.groups else []
    if left:
        yield f"{where}.groups leaves out device {left[0]}; put each device into one group"
    yield from _wrong_uplink(where, host)


def _wrong_uplink(where: str, host: Host) -> Iterator[str]:
    if len(host.groups) > 1 and host.uplink is None:
        yield (
            f"{where}.uplink is missing, and the host has {len(host.groups)} groups; name the "
            "link over which a group reaches the others"
        )
    if not host.groups and host.uplink is not None:
        yield (
            f"{where}.uplink is {host.uplink!r}, and the host has no groups; give in groups "
            "which devices share an uplink"
        )


def _wrong_links_between(where: str, host: Host, num_hosts: int) -> Iterator[str]:
    if len(host.devices) > 1 and host.port is None:
        yield (
            f"{where}.port is missing, and the host has {len(host.devices)} devices; name the "
            "link over which they reach each other"
        )
    if host.network is None and num_hosts > 1:
        yield (
            f"{where}.network is missing, and the cluster has {num_hosts} hosts; name the link "
            "over which they reach each other"
        )
    if host.network is None and host.cards != 1:
        yield f"{where}.cards is {host.cards}, and the host has no network; name the link"
    if host.devices and host.cards > 0 and len(host.devices) % host.cards:
        yield (
            f"{where}.cards is {host.cards}, and the host has {len(host.devices)} devices; "
            "give a number of cards that its devices share evenly"
        )


def _wrong_together(hosts: tuple[Host, ...]) -> Iterator[str]:
    names: dict[str, int] = {}
    for n, host in enumerate(hosts):
        if host.name in names:
            yield (
                f"hosts[{n}].name is {host.name!r}, and so is hosts[{names[host.name]}].name; "
                "give each its own"
            )
        names[host.name] = n
    num_devices = sum(host.count * len(host.devices) for host in hosts)
    if num_devices > MOST_DEVICES:
        yield f"hosts have {num_devices:,} devices in all; a cluster has at most {MOST_DEVICES:,}"


def _wrong_numbers(
    where: str, owner: Link | Host, names: Iterable[str], *, above_zero: bool = False
) -> Iterator[str]:
    """Yield faults of fields that are not finite or too small; None is no number."""
    for name in names:
        value = getattr(owner, name)
        if value is None:
            continue
        if not math.isfinite(value):
            yield f"{where}.{name} is {value}; give a finite number"
        elif value < 0 or (above_zero and value == 0):
            least = "above" if above_zero else "from"
            yield f"{where}.{name} is {value}; give a number {least} 0"


def _unknown(where: str, name: str, what: str, known: Iterable[str]) -> str:
    there = ", ".join(sorted(known)) or "none"
    return f"{where} is {name!r}, which is not in {what}; there are {there}"
