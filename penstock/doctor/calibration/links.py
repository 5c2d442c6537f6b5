"""What a message from one process, or thread, to another of this host takes, as in training.

Two processes are started by torchrun, each with one thread:

    rank 0 and rank 1 in turn    a message there and one back, small and large
    both at once                 each sends a large one, then receives
    rank 0, then rank 1          a send while nobody receives; a receive of what is there already
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from penstock.errors import MeshError
from penstock.mesh import Mesh, init_mesh
from penstock.schedules.ir import Forward, Message
from penstock.schedules.transfers import chain_transfers
from penstock.transport.channels import Gradient
from penstock.transport.headers import Payload
from penstock.transport.threads import QueueChannels
from penstock.transport.torch_distributed import Incoming, Outgoing

from .figures import LEAST_TIMES, MeasuredLink, Spread, seconds_of

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
        _run_apart(
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


def _run_apart(
    command: Sequence[str],
    who: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command, and return what it wrote.

    Raises:
        MeshError: it failed, or took too long.
    """
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except subprocess.TimeoutExpired:
        raise MeshError(
            f"{who} took more than {timeout_s:.0f} s to be measured: the machine is busy with "
            "other work. Stop that, and calibrate again"
        ) from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["no word was written"]
        raise MeshError(f"{who} could not be measured: {lines[-1]}") from None
    return done.stdout


_INSTRUCTION = Forward(0, 0)
_AT_ONCE = 100


def measure_threads(num_bytes: int, budget_s: float) -> MeasuredLink:
    """Measure two threads that pass a tensor to each other, and read and write all of it.

    What reading and writing takes one thread alone is not counted.  Nothing is copied, so that
    messages of both ways do not meet.
    """
    tensor = torch.zeros(num_bytes // 4)
    part_s = budget_s / 4
    small_s = _one_way_s(lambda: None, part_s)
    passed_s = _one_way_s(lambda: tensor.add_(1), part_s)
    alone_s = seconds_of(lambda: tensor.add_(1), part_s).middle
    large_s = Spread(*(max(0.0, seconds - alone_s) for seconds in passed_s))
    overhead_s = _overhead_s(part_s)
    return MeasuredLink(num_bytes, small_s, large_s, large_s, overhead_s, overhead_s)


def _one_way_s(touch: Callable[[], Any], budget_s: float) -> Spread:
    """Return half of what it takes to another thread and back, with a touch in each."""
    channels = QueueChannels(chain_transfers(2), _TIMEOUT_S, nullcontext())
    end = object()

    def answer() -> None:
        torch.set_num_threads(1)
        count = 0
        while channels.receive(_there(count), _INSTRUCTION) is not end:
            touch()
            channels.send(_back(count), None)
            count += 1

    peer = threading.Thread(target=answer, daemon=True)
    peer.start()
    times_s: list[float] = []
    began_s = time.perf_counter()
    while len(times_s) < LEAST_TIMES or time.perf_counter() - began_s < budget_s:
        start_s = time.perf_counter()
        channels.send(_there(len(times_s)), None)
        channels.receive(_back(len(times_s)), _INSTRUCTION)
        touch()
        times_s.append((time.perf_counter() - start_s) / 2)
    channels.send(_there(len(times_s)), end)
    peer.join(_TIMEOUT_S)
    return Spread.of(times_s)


def _overhead_s(budget_s: float) -> Spread:
    """Return half of what a send and the receive of a message that is there take one thread."""
    channels = QueueChannels(chain_transfers(2), _TIMEOUT_S, nullcontext())

    def run() -> None:
        for _ in range(_AT_ONCE):
            channels.send(_there(0), None)
        for _ in range(_AT_ONCE):
            channels.receive(_there(0), _INSTRUCTION)

    return seconds_of(run, budget_s).times(1 / (2 * _AT_ONCE))


def _there(microbatch: int) -> Message:
    return False, 0, 1, microbatch


def _back(microbatch: int) -> Message:
    return True, 1, 0, microbatch


if __name__ == "__main__":
    main()
