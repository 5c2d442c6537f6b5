"""Rank 0 lets in who knows its secret, and waits for nobody else."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address

import pytest

from penstock.errors import PeerError
from penstock.mesh.lifelines import _HELLO, _Address, _admit, _Failure, _reach, listen, own_host

SECRET = b"sixteen letters."


class Door:
    """Rank 0, which waits for others in a thread."""

    def __init__(self, count: int, timeout_s: float = 30.0) -> None:
        self.listener, self.failure = listen("127.0.0.1"), _Failure()
        host, port = self.listener.getsockname()
        self.address = _Address("here", host, port, SECRET)
        deadline = time.monotonic() + timeout_s
        self._thread = ThreadPoolExecutor(1)
        self.lines = self._thread.submit(
            _admit, self.listener, SECRET, count, self.failure, deadline
        )

    def knock(self, said: bytes) -> socket.socket:
        """Connect as somebody who says this."""
        stranger = socket.create_connection(self.address[1:3], 30.0)
        stranger.sendall(said)
        return stranger

    def enter(self, rank: int) -> socket.socket:
        """Connect as a rank does."""
        return _reach(self.address, rank, _Failure(), time.monotonic() + 30.0)

    def close(self) -> None:
        self.failure.fail(PeerError("the test has ended"))
        self._thread.shutdown()
        self.listener.close()


@pytest.fixture
def door() -> Iterator[Door]:
    """Yield a door for ranks 1 and 2."""
    made = Door(2)
    yield made
    made.close()


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked for their address")
def test_the_interface_that_gloo_was_told_to_use_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,other")
    assert own_host() == ("127.0.0.1", "127.0.0.1")


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked for their address")
def test_only_the_interface_that_others_know_is_listened_on(monkeypatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    for chosen, master in (("lo", "192.0.2.1"), ("", "127.0.0.1"), ("", "localhost")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
        monkeypatch.setenv("MASTER_ADDR", master)
        host, interface = own_host()
        with listen(interface) as listener:
            assert host == interface == listener.getsockname()[0]
            assert ip_address(host).is_loopback


def test_who_does_not_know_the_secret_is_turned_away(door: Door) -> None:
    for said in (b"hello?", bytes(_HELLO.size), _HELLO.pack(SECRET, 1)[:-1]):
        with door.knock(said) as stranger:
            assert stranger.recv(1) == b""
    assert not door.lines.done()


def test_silent_strangers_keep_nobody_waiting(door: Door) -> None:
    strangers = [door.knock(b"") for _ in range(80)]
    entered = [door.enter(rank) for rank in (2, 1)]
    lines = door.lines.result(30.0)
    assert sorted(lines) == [1, 2]
    assert [lines[rank].getpeername() for rank in (2, 1)] == [e.getsockname() for e in entered]
    assert strangers[0].recv(1) == b""
    for one in (*strangers, *entered, *lines.values()):
        one.close()


def test_nobody_takes_the_place_of_one_that_is_here(door: Door) -> None:
    first, again = door.enter(1), door.enter(1)
    second = door.enter(2)
    lines = door.lines.result(30.0)
    assert again.recv(1) == b""
    assert lines[1].getpeername() == first.getsockname()
    for one in (first, again, second, *lines.values()):
        one.close()


def test_who_waits_for_others_learns_of_a_failure(door: Door) -> None:
    threading.Timer(0.1, door.failure.fail, [PeerError("rank 1 failed")]).start()
    with pytest.raises(PeerError, match="rank 1 failed"):
        door.lines.result(30.0)


def test_who_waits_for_others_waits_until_its_deadline() -> None:
    door = Door(1, timeout_s=0.1)
    with pytest.raises(TimeoutError):
        door.lines.result(30.0)
    door.close()


def test_a_process_that_cannot_be_reached_is_named(door: Door) -> None:
    with listen("127.0.0.1") as gone:
        address = door.address._replace(port=gone.getsockname()[1])
    with pytest.raises(ConnectionError, match="where rank 0 listens"):
        _reach(address, 1, _Failure(), time.monotonic() + 30.0)
