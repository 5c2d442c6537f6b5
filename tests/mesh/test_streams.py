"""Streams carry bytes in order, never block their sender, and wake who waits in vain."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from penstock.errors import PeerError
from penstock.mesh.background import Background, Worker
from penstock.mesh.readiness import Alarm
from penstock.mesh.streams import Inflow, Outflow
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
    """Yield the threads of a process that is alone."""
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
    """Yield a stream whose kernel takes little at once."""
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
