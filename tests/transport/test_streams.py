"""Streams carry bytes in order, never block their sender, and wake who waits in vain."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from penstock.errors import PeerError
from penstock.mesh.background import Background, Worker
from penstock.mesh.flows import Alarm, Inflow, Outflow
from penstock.mesh.process_group import ProcessGroup
from penstock.mesh.streams import Streams, _listen, _own_host
from penstock.mesh.watch import Watch

MEGABYTES = 1 << 20


def some_bytes(count: int) -> bytes:
    return bytes(torch.randint(256, (count,), dtype=torch.uint8).numpy())


def read(inflow: Inflow, count: int, timeout_s: float = 30.0) -> bytes:
    room = bytearray(count)
    inflow.read(room, time.monotonic() + timeout_s)
    return bytes(room)


@pytest.fixture
def background() -> Iterator[Background]:
    """Give the threads of a process that is alone."""
    background = Background(Watch(HashStore(), "nowhere", 0, 1), timeout_s=30.0)
    yield background
    background.close()
    assert background.has_ended


@dataclass(frozen=True, slots=True)
class Pair:
    """The two ends of a stream, in one process."""

    outflow: Outflow
    inflow: Inflow
    alarm: Alarm

    def send(self, *parts: bytes) -> bool:
        """Send; tell whether all has left at once."""
        rest = self.outflow.write(list(parts))
        if rest:
            self.outflow.write_later(rest, lambda: None)
        return not rest


@pytest.fixture
def pair(background: Background) -> Iterator[Pair]:
    """Give a stream whose kernel takes little at once."""
    here, there = socket.socketpair()
    for end in (here, there):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    alarm = Alarm()

    def make_worker() -> Worker:
        return background.new_worker("sends")

    pair = Pair(Outflow(here, alarm, make_worker), Inflow(there, alarm), alarm)
    yield pair
    alarm.fail(PeerError("the test is over"))
    background.close()
    pair.outflow.close()
    pair.inflow.close()
    alarm.close()


def test_a_small_message_leaves_at_once(pair: Pair) -> None:
    assert pair.send(b"one", b"two")
    assert read(pair.inflow, 6) == b"onetwo"


def test_a_message_larger_than_the_kernel_takes_arrives_whole_and_in_order(pair: Pair) -> None:
    large, larger = some_bytes(3 * MEGABYTES), some_bytes(5 * MEGABYTES)
    assert not pair.send(b"first", large, b"then")  # nobody reads, and the sender goes on
    assert not pair.send(b"small, but behind")
    assert not pair.send(larger)
    assert read(pair.inflow, 5) == b"first"
    assert read(pair.inflow, len(large)) == large
    assert read(pair.inflow, 4 + 17) == b"thensmall, but behind"
    assert read(pair.inflow, len(larger)) == larger


def test_nothing_leaves_before_what_waits_to_be_sent(pair: Pair) -> None:
    class Idle:
        """A thread that does not come to its job."""

        def submit(self, job: object) -> None:
            self.job = job

    here, there = socket.socketpair()
    here.setblocking(False)
    outflow = Outflow(here, pair.alarm, lambda: Idle())  # type: ignore[arg-type,return-value]
    outflow.write_later(outflow.write([bytes(MEGABYTES)]), lambda: None)
    there.recv(MEGABYTES)  # there is room again
    assert outflow.write([b"behind"]) == [b"behind"]
    outflow.close()
    there.close()


def test_more_parts_than_one_call_takes_arrive_in_order(pair: Pair) -> None:
    parts = [bytes([n % 256]) * (n % 5 + 1) for n in range(1500)]
    pair.send(*parts)
    assert read(pair.inflow, sum(map(len, parts))) == b"".join(parts)


def test_a_reader_gives_up_at_its_deadline(pair: Pair) -> None:
    pair.send(b"half")
    with pytest.raises(TimeoutError):
        read(pair.inflow, 8, timeout_s=0.05)


def test_a_reader_that_waits_learns_of_a_failure(pair: Pair) -> None:
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            read(pair.inflow, 1)
        except PeerError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    pair.alarm.fail(PeerError("rank 1 failed"))
    waiting.join(30.0)
    assert [str(error) for error in caught] == ["rank 1 failed"]


def test_a_broken_connection_is_seen_on_either_side(pair: Pair) -> None:
    pair.outflow.close()
    with pytest.raises(ConnectionError, match="closed by peer"):
        read(pair.inflow, 1)
    pair.inflow.close()
    with pytest.raises(ConnectionError):
        pair.send(b"anybody?")


@pytest.fixture
def streams(background: Background) -> Iterator[Streams]:
    """Give the streams of a process that talks to itself."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    streams = Streams(ProcessGroup.of_all(background))
    yield streams
    streams.close()
    dist.destroy_process_group()


def test_streams_are_found_by_rank_and_number(streams: Streams) -> None:
    for channel in (1, 0):
        assert not streams.outflow(0, channel).write([b"number %d" % channel])
    for channel in (0, 1):
        inflow = streams.inflow(0, channel, time.monotonic() + 30.0)
        assert read(inflow, 8) == b"number %d" % channel


def test_between_hosts_a_stream_is_tcp(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.mesh.streams._has_local_names", lambda: False)
    outflow, large = streams.outflow(0, 0), some_bytes(3 * MEGABYTES)
    assert outflow._connection.family in (socket.AF_INET, socket.AF_INET6)
    rest = outflow.write([large])
    if rest:
        outflow.write_later(rest, lambda: None)
    assert read(streams.inflow(0, 0, time.monotonic() + 30.0), len(large)) == large


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked for their address")
def test_the_interface_that_gloo_was_told_to_use_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,other")
    assert _own_host() == ("127.0.0.1", "127.0.0.1")


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are asked for their address")
def test_only_the_interface_that_others_know_is_listened_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    for chosen, master in (("lo", "192.0.2.1"), ("", "127.0.0.1"), ("", "localhost")):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
        monkeypatch.setenv("MASTER_ADDR", master)
        host, interface = _own_host()
        with _listen(interface) as listener:
            assert host == interface == listener.getsockname()[0]
            assert ip_address(host).is_loopback


def test_who_does_not_know_the_word_is_turned_away(streams: Streams) -> None:
    port = streams._mine.port
    for said in (b"", b"hello?", bytes(24)):
        with socket.create_connection((streams._mine.host, port)) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            with pytest.raises(TimeoutError):
                streams.inflow(0, 0, time.monotonic() + 0.05)
            assert stranger.recv(1) == b""


def test_silent_strangers_keep_nobody_waiting(streams: Streams) -> None:
    address = (streams._mine.host, streams._mine.port)
    strangers = [socket.create_connection(address) for _ in range(80)]
    strangers[-1].sendall(b"slow")
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        streams.inflow(0, 0, began + 0.2)
    assert not streams.outflow(0, 0).write([b"hello"])
    assert read(streams.inflow(0, 0, time.monotonic() + 30.0), 5) == b"hello"
    assert strangers[0].recv(1) == b""  # there are too many: the first ones are turned away
    for stranger in strangers:
        stranger.close()


def test_nobody_takes_the_place_of_a_stream_that_is_here(streams: Streams) -> None:
    assert not streams.outflow(0, 0).write([b"first"])
    inflow = streams.inflow(0, 0, time.monotonic() + 30.0)
    first = streams._outflows.pop((0, 0))
    streams.outflow(0, 0)
    streams.outflow(0, 1)
    streams.inflow(0, 1, time.monotonic() + 30.0)
    assert streams.inflow(0, 0, time.monotonic() + 30.0) is inflow
    assert read(inflow, 5) == b"first"
    first.close()


def test_a_process_that_cannot_be_reached_is_named(streams: Streams) -> None:
    streams.close()
    with pytest.raises(ConnectionError, match="where rank 0 listens"):
        streams.outflow(0, 0)
