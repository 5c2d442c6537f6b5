"""What a message from one process to another of this host takes, as those of training go.

Two processes are started by torchrun, each with one thread:

    rank 0 and rank 1 in turn    a message there and one back, small and large
    both at once                 each sends a large one, then receives
    rank 0, then rank 1          a send while nobody receives; a receive of what is there already
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.mesh import Mesh, init_mesh
from penstock.transport.headers import Payload
from penstock.transport.payload import Gradient
from penstock.transport.torch_distributed import Incoming, Outgoing

from .figures import MeasuredLink, Spread
from .process_bytes import run_apart

_SMALL_BYTES = 64
_TIMEOUT_S = 60.0
_WARM, _LEAST_TIMES, _MOST_TIMES = 5, 5, 2000
_CHANNELS = 2
_FOR_A_PROCESS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def measure_processes(num_bytes: int, budget_s: float) -> MeasuredLink:
    """Measure two processes of this host that send each other tensors of so many bytes.

    Raises:
        MeshError: they failed, or took too long.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _FOR_A_PROCESS}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        words = [str(num_bytes), str(budget_s), str(result)]
        started = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        run_apart(
            [sys.executable, "-m", *started, "-m", __name__, *words],
            "two processes of this host",
            _TIMEOUT_S + budget_s,
            {**environment, "OMP_NUM_THREADS": "1"},
        )
        spreads = json.loads(result.read_text())
    return MeasuredLink(num_bytes, *(Spread(*spread) for spread in spreads))


class _Ends:
    """Both directions to the other process, on each of a few connections."""

    def __init__(self, mesh: Mesh) -> None:
        peer = 1 - mesh.rank
        mine = [_CHANNELS * mesh.rank + n for n in range(_CHANNELS)]
        theirs = [_CHANNELS * peer + n for n in range(_CHANNELS)]
        self._out = [Outgoing(mesh, mesh.rank, peer, channel) for channel in mine]
        self._in = [Incoming(mesh, peer, channel) for channel in theirs]

    def send(self, payload: Payload, channel: int = 0) -> float:
        """Send, and return for how long that took."""
        start_s = time.perf_counter()
        self._out[channel].send(payload, 0)
        return time.perf_counter() - start_s

    def receive(self, channel: int = 0) -> float:
        """Receive, and return for how long that took."""
        start_s = time.perf_counter()
        self._in[channel].receive(0, _TIMEOUT_S)
        return time.perf_counter() - start_s

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for out in self._out:
            out.finish(_TIMEOUT_S)


def _there_and_back(ends: _Ends, leads: bool, payload: Payload) -> float:
    start_s = time.perf_counter()
    if leads:
        ends.send(payload)
        ends.receive()
    else:
        ends.receive()
        ends.send(payload)
    ends.finish()
    return (time.perf_counter() - start_s) / 2


def _crossing(ends: _Ends, leads: bool, payload: Payload) -> float:
    small = _payload(_SMALL_BYTES)
    if leads:  # both are to begin together
        ends.send(small, 1)
        ends.receive(1)
    else:
        ends.receive(1)
        ends.send(small, 1)
    start_s = time.perf_counter()
    ends.send(payload)
    ends.receive()
    ends.finish()
    return time.perf_counter() - start_s


def _busy(ends: _Ends, leads: bool, payload: Payload) -> float:
    """Send while nobody receives, and receive what is there; return the longer of the two."""
    small = _payload(_SMALL_BYTES)
    if leads:
        sent_s = ends.send(payload)
        ends.send(small, 1)
        ends.receive(1)
        ends.finish()
        return sent_s
    ends.receive(1)
    received_s = ends.receive()
    ends.send(small, 1)
    ends.finish()
    return received_s


_Step = Callable[[_Ends, bool, Payload], float]


def _measure(mesh: Mesh, ends: _Ends, step: _Step, num_bytes: int, budget_s: float) -> Spread:
    """Repeat a step as often on both ranks; return the longer medians of both."""
    payload, leads = _payload(num_bytes), mesh.rank == 0
    warm_s = [step(ends, leads, payload) for _ in range(_WARM)]
    mine = int(budget_s / max(sorted(warm_s)[_WARM // 2], 1e-7))
    times = max(_LEAST_TIMES, min(_MOST_TIMES, _of_first(mesh, mine)))
    spread = Spread.of([step(ends, leads, payload) for _ in range(times)])
    return max(Spread(*found) for found in _gather(mesh, list(spread)))


def _payload(num_bytes: int) -> Payload:
    return Gradient((torch.zeros(num_bytes // 4),))


def _of_first(mesh: Mesh, number: int) -> int:
    return int(_gather(mesh, [float(number)])[0][0])


def _gather(mesh: Mesh, numbers: list[float]) -> list[list[float]]:
    """Return the numbers of both ranks."""
    both = torch.zeros(2, len(numbers), dtype=torch.float64)
    both[mesh.rank] = torch.tensor(numbers, dtype=torch.float64)
    mesh.world.tensors.all_reduce(both, "for the other process to tell what it measured")
    return [[float(x) for x in row] for row in both]


def main() -> None:
    """Measure as one of the two processes; rank 0 writes the result."""
    num_bytes, budget_s, result = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    with init_mesh(2, timeout_s=_TIMEOUT_S, device="cpu") as mesh:
        ends = _Ends(mesh)
        steps: list[tuple[_Step, int]] = [
            (_there_and_back, _SMALL_BYTES),
            (_there_and_back, num_bytes),
            (_crossing, num_bytes),
            (_busy, _SMALL_BYTES),
            (_busy, num_bytes),
        ]
        part_s = budget_s / len(steps)
        spreads = [_measure(mesh, ends, step, size, part_s) for step, size in steps]
        if mesh.rank == 0:
            result.write_text(json.dumps(spreads))


if __name__ == "__main__":
    main()
