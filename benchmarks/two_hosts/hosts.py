"""Two hosts on one machine: network namespaces joined by one link, which can be throttled.

    namespace a                         namespace b
    10.213.0.1, penstock0 ◄── link ──► penstock0, 10.213.0.2

Nothing outside the two namespaces is touched, and no packet leaves them.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "penstock0"
ADDRESSES = ("10.213.0.1", "10.213.0.2")
_NEEDED = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_QUEUE = "100ms"
_LEAST_BURST_BYTES, _BURST_S = 32 * 1024, 4e-3
"""What may pass at once: as much as the rate allows in `_BURST_S`."""


class NoHosts(Exception):
    """This machine does not let two hosts be made; says why, in one line."""


@dataclass(frozen=True, slots=True)
class TwoHosts:
    """The names of both namespaces."""

    names: tuple[str, str]

    def command(self, host: int) -> list[str]:
        """Give what to put before a command that is to run on `host`, 0 or 1."""
        return ["ip", "netns", "exec", self.names[host]]

    def cut_off(self, host: int) -> None:
        """Take the link down on `host`, 0 or 1: what was sent is lost, and nobody is told."""
        _run("ip", "-n", self.names[host], "link", "set", INTERFACE, "down")

    def throttle(self, bits_per_s: float | None) -> None:
        """Let the link carry so much in each direction, whatever it would carry otherwise.

        Raises:
            NoHosts: the kernel has no token bucket filter.
        """
        for name in self.names:
            command = ["tc", "-n", name, "qdisc"]
            if bits_per_s is None:
                _run(*command, "replace", "dev", INTERFACE, "root", "pfifo_fast")
                continue
            burst = max(_LEAST_BURST_BYTES, int(bits_per_s / 8 * _BURST_S))
            rate = ["rate", f"{bits_per_s:.0f}bit", "burst", f"{burst}b", "latency", _QUEUE]
            _run(*command, "replace", "dev", INTERFACE, "root", "tbf", *rate)


def why_not() -> str | None:
    """Say in one line why two hosts cannot be made here; None if they can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces are made by root only: run it as root, on a machine of your own"
    lacking = [name for name, bit in _NEEDED.items() if not _capabilities() >> bit & 1]
    if lacking:
        return f"root lacks {' and '.join(lacking)} here, as in most containers"
    return None


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make two hosts; they are gone afterwards, also after a failure or Ctrl-C.

    Raises:
        NoHosts: they cannot be made.
    """
    reason = why_not()
    if reason is not None:
        raise NoHosts(reason)
    first, second = (f"penstock-{os.getpid()}-{letter}" for letter in "ab")
    hosts = TwoHosts((first, second))
    try:
        _build(hosts)
        yield hosts
    finally:
        _remove(hosts)


def sent_bytes() -> int:
    """Give the bytes that this host has sent over the link so far, by its interface's counter."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def _build(hosts: TwoHosts) -> None:
    first, second = hosts.names
    _run("ip", "netns", "add", first)
    _run("ip", "netns", "add", second)
    ends = ["type", "veth", "peer", "name", INTERFACE, "netns", second]
    _run("ip", "-n", first, "link", "add", "name", INTERFACE, *ends)
    for name, address in zip(hosts.names, ADDRESSES, strict=True):
        _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")


def _remove(hosts: TwoHosts) -> None:
    """Remove both namespaces, and the link with them; a second Ctrl-C does not stop that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for name in hosts.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    finally:
        signal.signal(signal.SIGINT, before)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().partition("\n")[0]
        raise NoHosts(f"{' '.join(command)}: {said}")


def _capabilities() -> int:
    """Give this process's effective capabilities as bits; all where that is not known."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(x.split()[1], 16) for x in lines if x.startswith("CapEff:")), -1)
