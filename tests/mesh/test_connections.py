"""A process lets in who knows its secret, and waits for nobody else."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from ipaddress import ip_address

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from penstock.errors import PeerError
from penstock.mesh.addresses import listen, own_host
from penstock.mesh.authentication import HELLO
from penstock.mesh.background import Background
from penstock.mesh.connections import Connections
from penstock.mesh.process_group import ProcessGroup
from penstock.mesh.streams import Inflow
from penstock.mesh.watch import Watch


@pytest.fixture
def connections() -> Iterator[Connections]:
    """Yield the connections of a process that talks to itself."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    background = Background(Watch(HashStore(), "nowhere", 0, 1), timeout_s=30.0)
    connections = Connections(ProcessGroup.of_all(background))
    yield connections
    background.close()
    connections.close()
    dist.destroy_process_group()


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


def read(inflow: Inflow, count: int) -> bytes:
    room = bytearray(count)
    inflow.read(room, soon())
    return bytes(room)


def address(connections: Connections) -> tuple[str, int]:
    own = connections._addresses[0]
    return own.host, own.port


def test_connections_are_found_by_rank_and_number(connections: Connections) -> None:
    for number in (1, 0):
        assert not connections.outflow(0, number).write([b"number %d" % number])
    for number in (0, 1):
        assert read(connections.inflow(0, number, soon()), 8) == b"number %d" % number


def test_between_hosts_a_connection_is_tcp(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.mesh.connections.has_local_names", lambda: False)
    outflow, large = connections.outflow(0, 0), bytes(range(256)) * 12_000
    assert outflow._connection.family in (socket.AF_INET, socket.AF_INET6)
    if rest := outflow.write([large]):
        outflow.write_later(rest, lambda: None)
    assert read(connections.inflow(0, 0, soon()), len(large)) == large


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


def test_who_does_not_know_the_secret_is_turned_away(connections: Connections) -> None:
    for said in (b"", b"hello?", bytes(HELLO.size)):
        with socket.create_connection(address(connections)) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            with pytest.raises(TimeoutError):
                connections.inflow(0, 0, soon(0.05))
            assert stranger.recv(1) == b""


def test_silent_strangers_keep_nobody_waiting(connections: Connections) -> None:
    strangers = [socket.create_connection(address(connections)) for _ in range(80)]
    strangers[-1].sendall(b"slow")
    with pytest.raises(TimeoutError):
        connections.inflow(0, 0, soon(0.2))
    assert not connections.outflow(0, 0).write([b"hello"])
    assert read(connections.inflow(0, 0, soon()), 5) == b"hello"
    assert strangers[0].recv(1) == b""  # there are too many: the first ones are turned away
    for stranger in strangers:
        stranger.close()


def test_nobody_takes_the_place_of_a_connection_that_is_here(connections: Connections) -> None:
    assert not connections.outflow(0, 0).write([b"first"])
    inflow = connections.inflow(0, 0, soon())
    first = connections._outflows.pop((0, 0))
    connections.outflow(0, 0)
    connections.outflow(0, 1)
    connections.inflow(0, 1, soon())
    assert connections.inflow(0, 0, soon()) is inflow
    assert read(inflow, 5) == b"first"
    first.close()


def test_who_waits_for_a_connection_learns_of_a_failure(connections: Connections) -> None:
    threading.Timer(0.1, connections._alarm.fail, [PeerError("rank 1 failed")]).start()
    with pytest.raises(PeerError, match="rank 1 failed"):
        connections.inflow(0, 0, soon())


def test_a_process_that_cannot_be_reached_is_named(connections: Connections) -> None:
    connections.close()
    with pytest.raises(ConnectionError, match="where rank 0 listens"):
        connections.outflow(0, 0)
