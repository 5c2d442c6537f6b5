"""A cluster as tables for a person."""

from collections.abc import Iterator, Mapping

from penstock.trace.units import (
    bytes_text,
    columns,
    count_text,
    percent_text,
    rate_text,
    time_text,
)

from .device import Device
from .hosts import Host, Link


def cluster_lines(
    name: str, devices: Mapping[str, Device], hosts: tuple[Host, ...], links: Mapping[str, Link]
) -> Iterator[str]:
    """Yield the hosts of a cluster, then the kinds of devices and links that they have."""
    num_hosts = sum(host.count for host in hosts)
    num_devices = sum(host.count * len(host.devices) for host in hosts)
    yield f"{name}: {count_text(num_hosts, 'host')}, {count_text(num_devices, 'device')}"
    yield ""
    yield from columns(list(_host_rows(hosts)), num_left=5)
    yield ""
    yield from columns(list(_device_rows(devices)), num_left=1)
    if links:
        yield ""
        yield from columns(list(_link_rows(links)), num_left=1)
    for n, host in enumerate(hosts):
        if host.busy_speed:
            shares = ", ".join(percent_text(share) for share in host.busy_speed)
            yield f"speed of each rank of hosts[{n}] while 1, 2, ... compute: {shares}"


def _host_rows(hosts: tuple[Host, ...]) -> Iterator[tuple[str, ...]]:
    yield "host", "devices", "port", "between groups", "network", "hosts", "memory"
    for host in hosts:
        kinds = {kind: host.devices.count(kind) for kind in dict.fromkeys(host.devices)}
        port = host.port or "-"
        cards = f"{host.cards} x " if host.network and host.cards > 1 else ""
        yield (
            host.name,
            ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
            f"{port} (processes: {host.processes})" if host.processes else port,
            f"{len(host.groups)} x {host.uplink}" if host.uplink else "-",
            f"{cards}{host.network}" if host.network else "-",
            str(host.count),
            "?" if host.memory_bytes is None else bytes_text(host.memory_bytes),
        )


def _device_rows(devices: Mapping[str, Device]) -> Iterator[tuple[str, ...]]:
    yield "device", "peak", "copy", "memory", "issue"
    for kind, device in devices.items():
        peaks = (f"{dtype} {rate_text(x, 'FLOP')}" for dtype, x in device.flops_per_s.items())
        yield (
            kind,
            ", ".join(peaks),
            rate_text(device.bytes_per_s, "B"),
            bytes_text(device.memory_bytes),
            time_text(device.issue_s),
        )


def _link_rows(links: Mapping[str, Link]) -> Iterator[tuple[str, ...]]:
    yield "link", "bandwidth", "latency", "overhead", "duplex", "sends"
    for name, link in links.items():
        yield (
            name,
            rate_text(link.bytes_per_s, "B"),
            time_text(link.latency_s),
            time_text(link.overhead_s),
            "yes" if link.duplex else "no",
            "block" if link.blocks else "overlap",
        )
