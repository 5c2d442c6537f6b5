"""Measure messages between threads, processes and GPUs of this host, sent as in training.

A process starts, and divides into two of one thread each:

    rank 0 and rank 1 in turn    a round trip, small and large
    both at once                 each sends a large message, then receives
    rank 0, then rank 1          a send while nobody receives; a receive of a message that is there
    both at once                 products with a small all-reduce after every few, and without
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.costs.cluster import Link
from penstock.errors import MeshError
from penstock.mesh import Mesh, init_mesh
from penstock.runtime.workers import QueueChannels
from penstock.schedules.ir import Forward
from penstock.schedules.transfers import chain_transfers
from penstock.transport.channels import Gradient
from penstock.transport.headers import Payload
from penstock.transport.torch_distributed import Incoming, Outgoing

from .figures import LEAST_TIMES, Figure, Spread, gemm_work, rounded, seconds_of

_SMALL_BYTES = 64
"""Bytes of a small message."""
_TIMEOUT_S = 60.0
"""Deadline of a message, in seconds."""
_PRODUCT = 256
"""Rows of a product."""
_PRODUCTS = 8
"""Products between two all-reduces."""
_PIECES = 8
"""All-reduces over which the mean is taken."""
_TO_ADD = "for the other process to add"
"""Completes "rank 1 waited ..."."""
_WARM = 3
"""Repeats before the measurement."""
_MOST_TIMES = 2000
"""Repeats of a measurement, at most."""
_HALF_WAY = 0.75
"""Share of a direction's speed that a duplex link keeps both ways; others fall to a half."""
_INSTRUCTION = Forward(0, 0)
"""Any instruction: a receive names it in errors."""
_AT_ONCE = 100
"""Small messages that are timed together."""
_HERE = "127.0.0.1"
"""The address at which both processes meet."""
_OF_A_JOB = "TORCHELASTIC"
"""Prefix of torchrun's variables: with them torch would look for the store of another job."""


class MeasuredLink(NamedTuple):
    """Seconds that messages take, of a few bytes and of `num_bytes`.

    `small_s` and `large_s` are from the begin of a send to the end of its receive, which waited.
    In `overhead_s` an end is busy with a small message, in `busy_s` with a large one; None if
    nobody copies it.  `crossing_s` is `large_s` with another message the other way; None if both
    never meet.  `collective_s` is a small all-reduce between products; None if there is none.
    """

    num_bytes: int
    small_s: Spread
    large_s: Spread
    overhead_s: Spread
    busy_s: Spread | None = None
    crossing_s: Spread | None = None
    collective_s: Spread | None = None

    @property
    def travel_s(self) -> float:
        """Seconds of the bytes alone, at least the noise of the measurement."""
        noise_s = (self.large_s.high - self.large_s.low) / 2
        return max(self.large_s.middle - self.small_s.middle, noise_s, 1e-9)

    def link(self, source: str) -> Link:
        """Return the link's description for a simulation."""
        overhead_s, both = self.overhead_s.middle, self.crossing_s
        copying_s = 0.0 if self.busy_s is None else self.busy_s.middle - overhead_s
        copies = copying_s > self.travel_s / 10
        latency_s = max(0.0, self.small_s.middle - 2 * overhead_s)
        begun_s = 0.0  # beside two messages, one after the other
        if self.collective_s is not None:
            begun_s = max(0.0, self.collective_s.middle - 2 * (latency_s + 2 * overhead_s))
        return Link(
            bytes_per_s=rounded(self.num_bytes / self.travel_s),
            latency_s=rounded(latency_s),
            duplex=both is None or self.large_s.middle / both.middle > _HALF_WAY,
            overhead_s=rounded(overhead_s),
            copy_bytes_per_s=rounded(self.num_bytes / copying_s) if copies else None,
            collective_s=rounded(begun_s),
            source=source,
        )

    def figures(self, name: str) -> list[Figure]:
        """Return the measured figures, as lines of a table."""
        size = f"{self.num_bytes >> 10} KiB"
        spreads = {
            "a small message": self.small_s,
            size: self.large_s,
            "either end busy, small": self.overhead_s,
            f"either end busy, {size}": self.busy_s,
            f"{size}, both ways at once": self.crossing_s,
            "a small all-reduce between products": self.collective_s,
        }
        known = {work: spread for work, spread in spreads.items() if spread is not None}
        return [Figure(f"{name}: {work}", "s", spread) for work, spread in known.items()]


# -- between GPUs ---------------------------------------------------------------------------------


def measure_gpus(source: torch.device, target: torch.device, budget_s: float) -> MeasuredLink:
    """Measure copies from one GPU to another."""
    num_bytes = 1 << 26

    def wait() -> None:
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)

    def copies_s(num_bytes: int, wait_for_end: Callable[[], None]) -> Spread:
        value = torch.ones(num_bytes // 4, device=source)
        into = torch.empty(num_bytes // 4, device=target)
        spread = seconds_of(
            lambda: into.copy_(value, non_blocking=True), budget_s / 3, wait_for_end
        )
        wait()
        return spread

    begun_s = copies_s(_SMALL_BYTES, lambda: None)
    small_s, large_s = (copies_s(size, wait) for size in (_SMALL_BYTES, num_bytes))
    return MeasuredLink(num_bytes, small_s, large_s, begun_s)


# -- between threads ------------------------------------------------------------------------------


def measure_threads(num_bytes: int, budget_s: float) -> MeasuredLink:
    """Measure two threads that pass a tensor to each other, and read and write all of it.

    The time of one thread to read and write it alone is subtracted.
    """
    tensor = torch.zeros(num_bytes // 4)
    part_s = budget_s / 4
    small_s = _one_way_s(lambda: None, part_s)
    passed_s = _one_way_s(lambda: tensor.add_(1), part_s)
    alone_s = seconds_of(lambda: tensor.add_(1), part_s).middle
    large_s = Spread(*(max(0.0, seconds - alone_s) for seconds in passed_s))
    return MeasuredLink(num_bytes, small_s, large_s, _overhead_s(part_s))


def _one_way_s(touch: Callable[[], Any], budget_s: float) -> Spread:
    """Return half of a round trip to another thread, with a `touch` in each."""
    # 1. Start a thread that answers each message.
    channels = QueueChannels(chain_transfers(2), _TIMEOUT_S, nullcontext())
    end = object()

    def answer() -> None:
        torch.set_num_threads(1)
        count = 0
        while channels.receive((False, 0, 1, count), _INSTRUCTION) is not end:
            touch()
            channels.send((True, 1, 0, count), None)
            count += 1

    peer = threading.Thread(target=answer, daemon=True)
    peer.start()
    # 2. Time round trips, at least a few.
    times_s: list[float] = []
    began_s = time.perf_counter()
    while len(times_s) < LEAST_TIMES or time.perf_counter() - began_s < budget_s:
        start_s = time.perf_counter()
        channels.send((False, 0, 1, len(times_s)), None)
        channels.receive((True, 1, 0, len(times_s)), _INSTRUCTION)
        touch()
        times_s.append((time.perf_counter() - start_s) / 2)
    # 3. Let the thread end.
    channels.send((False, 0, 1, len(times_s)), end)
    peer.join(_TIMEOUT_S)
    return Spread.of(times_s)


def _overhead_s(budget_s: float) -> Spread:
    """Return half of a send and a receive in one thread, with no wait."""
    channels = QueueChannels(chain_transfers(2), _TIMEOUT_S, nullcontext())

    def run() -> None:
        for _ in range(_AT_ONCE):
            channels.send((False, 0, 1, 0), None)
        for _ in range(_AT_ONCE):
            channels.receive((False, 0, 1, 0), _INSTRUCTION)

    return seconds_of(run, budget_s).times(1 / (2 * _AT_ONCE))


# -- between processes ----------------------------------------------------------------------------


def measure_processes(num_bytes: int, budget_s: float) -> MeasuredLink:
    """Measure two processes that send each other `num_bytes`; a MeshError if they fail."""
    # The processes are a job of their own, also within torchrun; they write a file of medians.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_JOB)}
    timeout_s = _TIMEOUT_S + budget_s
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        words = [__name__, str(num_bytes), str(budget_s), str(result)]
        try:
            subprocess.run(
                [sys.executable, "-m", *words],
                env={**environment, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=True,
            )
        # A busy machine is the usual cause.
        except subprocess.TimeoutExpired:
            raise MeshError(
                f"two processes of this host took more than {timeout_s:.0f} s to be measured: the "
                "machine is busy with other work. Stop that, and calibrate again"
            ) from None
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or ["no word was written"]
            raise MeshError(
                f"two processes of this host could not be measured: {lines[-1]}"
            ) from None
        spreads = json.loads(result.read_text())
    return MeasuredLink(num_bytes, *(Spread(*spread) for spread in spreads))


class _Ends:
    """Both directions to the other process, and a second connection that passes turns."""

    def __init__(self, mesh: Mesh) -> None:
        mine, theirs = mesh.rank, 1 - mesh.rank
        self._mesh, self._product = mesh, gemm_work(torch.device("cpu"), _PRODUCT)
        self._leads = mesh.is_first_rank
        self._out, self._turn_out = (Outgoing(mesh, mine, theirs, mine + n) for n in (0, 2))
        self._in, self._turn_in = (Incoming(mesh, theirs, theirs + n) for n in (0, 2))

    def there_and_back(self, payload: Payload) -> float:
        start_s = time.perf_counter()
        if self._leads:
            self._out.send(payload, 0)
        self._in.receive(0, _TIMEOUT_S)
        if not self._leads:
            self._out.send(payload, 0)
        self._out.finish(_TIMEOUT_S)
        return (time.perf_counter() - start_s) / 2

    def crossing(self, payload: Payload) -> float:
        self._pass_turn(to_first=False)
        self._pass_turn(to_first=True)
        start_s = time.perf_counter()
        self._out.send(payload, 0)
        self._in.receive(0, _TIMEOUT_S)
        self._out.finish(_TIMEOUT_S)
        return time.perf_counter() - start_s

    def busy(self, payload: Payload) -> float:
        """Send while nobody receives, then receive a waiting message; return the seconds."""
        if not self._leads:
            self._pass_turn(to_first=False)
        start_s = time.perf_counter()
        if self._leads:
            self._out.send(payload, 0)
        else:
            self._in.receive(0, _TIMEOUT_S)
        took_s = time.perf_counter() - start_s
        if self._leads:
            self._pass_turn(to_first=False)
        self._pass_turn(to_first=True)
        self._out.finish(_TIMEOUT_S)
        return took_s

    def all_reduce(self, payload: Payload) -> float:
        """Return the mean seconds of an all-reduce after a few products."""
        assert isinstance(payload, Gradient) and payload.leaves[0] is not None
        tensors = self._mesh.world.tensors
        alone_s = self._products_s(lambda: None)
        both_s = self._products_s(partial(tensors.all_reduce, payload.leaves[0], _TO_ADD))
        return max(0.0, both_s - alone_s)

    def _products_s(self, then: Callable[[], object]) -> float:
        """Return the seconds of a few products and `then`."""
        self._mesh.world.tensors.all_reduce(torch.zeros(1), _TO_ADD)  # begin together
        start_s = time.perf_counter()
        for _ in range(_PIECES):
            for _ in range(_PRODUCTS):
                self._product()
            then()
        return (time.perf_counter() - start_s) / _PIECES

    def _pass_turn(self, *, to_first: bool) -> None:
        """Let one process wait for the other, by a small message."""
        if self._leads == to_first:
            self._turn_in.receive(0, _TIMEOUT_S)
        else:
            self._turn_out.send(_payload(_SMALL_BYTES), 0)
            self._turn_out.finish(_TIMEOUT_S)


def _payload(num_bytes: int) -> Payload:
    return Gradient((torch.zeros(num_bytes // 4),))


def _measure(mesh: Mesh, step: Callable[[], float], budget_s: float) -> Spread:
    """Repeat a step equally often on both ranks; return the longer medians of both."""
    purpose = "for the other process to tell what it measured"
    ends_s = [(step(), time.perf_counter())[1] for _ in range(_WARM + 1)]
    warm_s = sorted(b - a for a, b in pairwise(ends_s))[_WARM // 2]
    times_wanted = mesh.world.highest(int(budget_s / max(warm_s, 1e-7)), purpose)
    times = max(LEAST_TIMES, min(_MOST_TIMES, times_wanted))
    spread = Spread.of([step() for _ in range(times)])
    return max(Spread(*values) for values in mesh.world.gather(tuple(spread), purpose))


def main() -> None:
    """Measure as one of the two processes; rank 0 writes the result."""
    num_bytes, budget_s, result = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    # Both processes are one until now, so that torch is imported once.
    with socket.create_server((_HERE, 0)) as found:
        port = found.getsockname()[1]
    other = os.fork()
    rank = str(int(other == 0))
    where = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": _HERE, "MASTER_PORT": str(port)}
    os.environ.update(where, WORLD_SIZE="2")
    with init_mesh(2, timeout_s=_TIMEOUT_S, device="cpu") as mesh:
        ends = _Ends(mesh)
        steps = [
            (ends.there_and_back, _SMALL_BYTES),
            (ends.there_and_back, num_bytes),
            (ends.busy, _SMALL_BYTES),
            (ends.busy, num_bytes),
            (ends.crossing, num_bytes),
            (ends.all_reduce, _SMALL_BYTES),
        ]
        part_s = budget_s / len(steps)
        spreads = [_measure(mesh, partial(step, _payload(size)), part_s) for step, size in steps]
        if mesh.is_first_rank:
            result.write_text(json.dumps(spreads))


if __name__ == "__main__":
    main()
