"""All connect to rank 0, which lets in who knows the secret, and waits for nobody else."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address

import pytest

from penstock.errors import PeerError
from penstock.mesh.authentication import HELLO, SECRET_BYTES, Entrance
from penstock.mesh.connections import accept, connect, listen, own_host
from penstock.mesh.readiness import Alarm

SECRET = bytes(range(SECRET_BYTES))


@dataclass(slots=True)
class RankZero:
    """What rank 0 listens with."""

    alarm: Alarm = field(default_factory=Alarm)
    listener: socket.socket = field(default_factory=lambda: listen("127.0.0.1"))
    entrance: Entrance = field(init=False)

    def __post_init__(self) -> None:
        self.entrance = Entrance([self.listener], SECRET, self.alarm)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.listener.getsockname()
        return host, port

    def reach(self, rank: int) -> socket.socket:
        """Connect as the process `rank` does."""
        deadline = time.monotonic() + 30.0
        return connect(self.address, HELLO.pack(SECRET, rank), deadline, self.alarm.check)

    def accept(self, world_size: int, timeout_s: float = 30.0) -> dict[int, socket.socket]:
        return accept(self.entrance, world_size, time.monotonic() + timeout_s)


@pytest.fixture
def zero() -> Iterator[RankZero]:
    zero = RankZero()
    yield zero
    zero.entrance.close()
    zero.alarm.close()


def close(*connections: socket.socket) -> None:
    for connection in connections:
        connection.close()


def test_each_connection_is_known_by_its_rank(zero: RankZero) -> None:
    there = {rank: zero.reach(rank) for rank in (2, 1)}
    here = zero.accept(3)
    assert sorted(here) == [1, 2]
    for rank, connection in there.items():
        connection.send(b"%d" % rank)
        here[rank].setblocking(True)
        assert here[rank].recv(1) == b"%d" % rank
    close(*here.values(), *there.values())


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked for their address")
def test_the_interface_that_gloo_was_told_to_use_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,other")
    assert own_host() == ("127.0.0.1", "127.0.0.1")


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked for their address")
def test_only_the_interface_that_others_know_is_listened_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    for chosen, master in (("lo", "192.0.2.1"), ("", "127.0.0.1"), ("", "localhost")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
        monkeypatch.setenv("MASTER_ADDR", master)
        host, interface = own_host()
        with listen(interface) as listener:
            assert host == interface == listener.getsockname()[0]
            assert ip_address(host).is_loopback


def test_who_does_not_know_the_secret_is_turned_away(zero: RankZero) -> None:
    for said in (b"", b"hello?", bytes(HELLO.size)):
        with socket.create_connection(zero.address) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            with pytest.raises(TimeoutError):
                zero.accept(2, 0.05)
            assert stranger.recv(1) == b""


def test_silent_strangers_keep_nobody_waiting(zero: RankZero) -> None:
    strangers = [socket.create_connection(zero.address) for _ in range(80)]
    strangers[-1].sendall(b"slow")
    with pytest.raises(TimeoutError):
        zero.accept(2, 0.2)
    there = zero.reach(1)
    here = zero.accept(2)
    assert strangers[0].recv(1) == b""  # there are too many: the first ones are turned away
    close(there, *here.values(), *strangers)


def test_nobody_takes_the_place_of_a_connection_that_is_here(zero: RankZero) -> None:
    first, outside, again, second = (zero.reach(rank) for rank in (1, 3, 1, 2))
    here = zero.accept(3)
    first.send(b"f")
    here[1].setblocking(True)
    assert here[1].recv(1) == b"f"
    for stranger in (outside, again):
        stranger.setblocking(True)
        assert stranger.recv(1) == b""
    close(first, outside, again, second, *here.values())


def test_rank_zero_learns_of_a_failure_while_it_waits(zero: RankZero) -> None:
    threading.Timer(0.1, zero.alarm.fail, [PeerError("rank 1 failed")]).start()
    with pytest.raises(PeerError, match="rank 1 failed"):
        zero.accept(2)


def test_where_nobody_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with pytest.raises(ConnectionError, match="where rank 0 listens"):
        connect(address, b"", time.monotonic() + 1.0, lambda: None)
