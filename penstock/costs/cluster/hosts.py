"""Kinds of hosts, and kinds of links."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A kind of link: bytes a second each way, and seconds until the first byte is there.

    `overhead_s` is for how long the sender computes nothing for each message, and the receiver
    likewise; with `blocks` the sender computes nothing until its message is there.  Where sender
    and receiver copy the bytes themselves, as between processes on CPUs, `copy_bytes_per_s` is how
    fast each does; None: others move them.  `collective_s` is what a collective takes beside its
    messages where ranks compute between one and the next: until it has begun everywhere, and all
    that wait for it have been woken.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    duplex: bool = True
    overhead_s: float = 0.0
    blocks: bool = False
    copy_bytes_per_s: float | None = None
    collective_s: float = 0.0
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """`count` hosts that are alike.

    `devices` names the kind of each device.  `port` is the link of each device to the others of
    its host; `processes` is the one where each rank is a process of its own, if that is another
    (`Cluster.between_processes`).  `groups` are numbers of devices behind one switch or socket;
    those of different groups talk over the `uplink` of each.  `network` is the link to other
    hosts: each host has `cards` of it, shared by its devices evenly, in order.

    `busy_speed[n - 1]` is how fast one of its ranks computes, as a share of one that is alone,
    while n of them do; beyond the last entry, ranks share what that many get together.
    """

    name: str
    devices: tuple[str, ...]
    count: int = 1
    port: str | None = None
    processes: str | None = None
    groups: tuple[tuple[int, ...], ...] = ()
    uplink: str | None = None
    network: str | None = None
    cards: int = 1
    memory_bytes: int | None = None
    busy_speed: tuple[float, ...] = ()

    def group_of(self, number: int) -> int | None:
        """Return the place in `groups` of the one with device `number`; None without groups."""
        return next((n for n, group in enumerate(self.groups) if number in group), None)

    def card_of(self, number: int) -> int:
        """Return which network card device `number` uses."""
        return number * self.cards // len(self.devices)
