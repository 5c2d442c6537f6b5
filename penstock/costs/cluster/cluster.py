"""Clusters: hosts, their devices and the links between them.

A value on its way from one device to another passes resources, each with a bandwidth:

    one host      port of A ─ [uplink of A's group ─ uplink of B's group] ─ port of B
    two hosts     port of A ─ network card of A's host ─ network card of B's host ─ port of B

A duplex link has two lanes, out and in; any other has one.  Transfers share a lane's bandwidth.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from penstock.errors import ConfigError
from penstock.plain_values import from_plain
from penstock.trace.units import (
    bytes_text,
    columns,
    count_text,
    percent_text,
    rate_text,
    time_text,
)

from .checks import wrong_in_cluster
from .files import (
    cluster_text,
    device_preset,
    file_text,
    naming,
    parsed,
    preset_names,
    read_text,
    write_text,
)
from .hosts import Device, Host, Link, Place, Route, route_between

_SEVERAL = re.compile(r"(?P<times>\d{1,9}) x (?P<name>.+)")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts, kinds of devices and links; devices are numbered host by host, in order.

    Raises:
        ConfigError: a name is unknown, or a figure is impossible; names the field.
    """

    name: str
    devices: Mapping[str, Device]
    hosts: tuple[Host, ...]
    links: Mapping[str, Link]
    source: str = ""

    def __post_init__(self) -> None:
        for wrong in wrong_in_cluster(self.devices, self.hosts, self.links):
            raise ConfigError(wrong)

    @classmethod
    def load(cls, path_or_preset: str | Path) -> Self:
        """Read a TOML file, or a preset of Penstock by its name, such as "p3.16xlarge".

        "4 x dgx-h100" is four times as many hosts; "h100", a device's preset, is a host of one.

        Raises:
            UnreadableError: there is no such file or preset, or a value is missing, unknown or of
                another type; names the file and the field.
            ConfigError: values do not fit together; names the file and the field.
        """
        several = _SEVERAL.fullmatch(str(path_or_preset))
        if several:
            return cls.load(several["name"]).times(int(several["times"]))
        with naming(path_or_preset):
            return cls.from_toml(cluster_text(path_or_preset))

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Read a cluster from the text of a TOML file; docs/clusters.md lists the keys.

        Raises:
            UnreadableError: it is no TOML, or a value is missing, unknown or of another type.
            ConfigError: values do not fit together.
        """
        cluster: Self = from_plain(cls, read_text(text))
        return cluster

    def to_toml(self, comment: str = "") -> str:
        """Return the text of a TOML file with this cluster, after lines of comment."""
        return write_text(self, comment)

    def save(self, path: str | Path, comment: str = "") -> None:
        """Write the cluster to a TOML file that a person may edit."""
        Path(path).write_text(self.to_toml(comment), encoding="utf-8")

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """Every device, by its number."""
        return tuple(
            Place(number, name, n, kind)
            for number, (name, host) in enumerate(self._each_host)
            for n, kind in enumerate(host.devices)
        )

    def device_of(self, place: int) -> Device:
        """Return the kind of the device with a number.

        Raises:
            ConfigError: there is none with this number.
        """
        return self.devices[self._at(place).kind]

    def host_of(self, place: int) -> Host:
        """Return the host of the device with a number.

        Raises:
            ConfigError: there is none with this number.
        """
        return self._each_host[self._at(place).host][1]

    def route(self, source: int, target: int) -> Route:
        """Return the route between two devices, by their numbers.

        Raises:
            ConfigError: there is no device with this number.
        """
        if (source, target) not in self._routes:
            a, b = ((self._at(place), self.host_of(place)) for place in (source, target))
            self._routes[source, target] = route_between(a, b, self.links)
        return self._routes[source, target]

    def times(self, number: int) -> Self:
        """Return a cluster with `number` times the hosts.

        Raises:
            ConfigError: it would have no hosts, or they have no network.
        """
        hosts = tuple(replace(host, count=host.count * number) for host in self.hosts)
        return replace(self, name=f"{number} x {self.name}", hosts=hosts)

    def check_devices(self, num_processes: int) -> None:
        """Refuse a job whose number of processes is not the number of devices.

        Raises:
            ConfigError: the numbers differ.
        """
        if len(self.places) != num_processes:
            raise ConfigError(
                f"the cluster {self.name} has {count_text(len(self.places), 'device')}, and there "
                f"{'is' if num_processes == 1 else 'are'} {count_text(num_processes, 'process')}; "
                "start one for each device (torchrun --nproc-per-node), or describe the devices "
                "that these run on"
            )

    def between_processes(self) -> Self:
        """Return the cluster for ranks in separate processes: `processes` replaces `port`."""
        hosts = (replace(h, port=h.processes or h.port, processes=None) for h in self.hosts)
        return replace(self, hosts=tuple(hosts))

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    @cached_property
    def _each_host(self) -> tuple[tuple[str, Host], ...]:
        return tuple(
            (host.name if host.count == 1 else f"{host.name}-{n}", host)
            for host in self.hosts
            for n in range(host.count)
        )

    @cached_property
    def _routes(self) -> dict[tuple[int, int], Route]:
        return {}

    def _at(self, place: int) -> Place:
        if not 0 <= place < len(self.places):
            raise ConfigError(
                f"the cluster {self.name} has no device {place}; they are numbered from 0 to "
                f"{len(self.places) - 1}"
            )
        return self.places[place]


def load_device(name_or_path: str | Path) -> Device:
    """Return the device of a preset's name, or of a TOML file: a device's fields, or a cluster
    with one kind of device.  An error names the file, and the place in it.
    """
    # 1. A preset's name comes first.
    names = preset_names("devices")
    if name_or_path in names:
        return device_preset(str(name_or_path))
    # 2. A file has the fields of a device, or a cluster with a single kind of device.
    with naming(name_or_path):
        known = f"no device of this name; described are {', '.join(names)}"
        text = file_text(name_or_path, known)
        data = parsed(text)
        if "devices" not in data:
            device: Device = from_plain(Device, data)
            return device
        devices = Cluster.from_toml(text).devices
        if len(devices) > 1:
            raise ConfigError(
                f"devices has {', '.join(devices)}, and one is wanted; give a file with the "
                "fields of that one"
            )
        return next(iter(devices.values()))


def _lines(cluster: Cluster) -> Iterator[str]:
    """Yield the hosts of a cluster, then the kinds of devices and links that they have."""
    num_hosts = sum(host.count for host in cluster.hosts)
    num_devices = sum(host.count * len(host.devices) for host in cluster.hosts)
    yield f"{cluster.name}: {count_text(num_hosts, 'host')}, {count_text(num_devices, 'device')}"
    yield ""
    yield from columns(list(_host_rows(cluster.hosts)), num_left=5)
    yield ""
    yield from columns(list(_device_rows(cluster.devices)), num_left=1)
    if cluster.links:
        yield ""
        yield from columns(list(_link_rows(cluster.links)), num_left=1)
    for n, host in enumerate(cluster.hosts):
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
