"""A process group that keeps NCCL's order, for a pretended GPU in each of several processes.

    compute        ── F0 ──┬───────── F1 ──── F2 ── wait ── B0
    communicator           └─ begins ─── runs with the peer ─┘       a queue, in the order of issue

In each group, a pair of ranks has a communicator for its messages, and all ranks have one for
their collectives.  A communicator is a stream, and a thread that runs its operations over gloo.
Messages are matched by order alone, and each is a rendezvous: the sender's memory is read once the
receiver has come to it, however late.  `wait` makes the current stream wait, and not the host:
what is issued to that stream afterwards has the true values.  Nobody may ask whether an operation
has ended.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from queue import SimpleQueue
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .memory import Memory
from .streams import Stream, Streams

NAME = "ordered"
"""Name of the backend."""
_ProcessGroup: Any = dist.ProcessGroup
_Job = Callable[[Any], Any]
"""Runs an operation, given a gloo group of the communicator's own; returns gloo's work."""


class _Work:
    """An operation under way; it keeps its tensors until somebody waits, as torch's does.

    One that is captured ends in each replay; `in_replay` waits for that.
    """

    def __init__(
        self,
        streams: Streams,
        stream: Stream,
        tensors: Sequence[Tensor],
        in_replay: Callable[[], Any] | None = None,
    ) -> None:
        self._streams, self._tensors, self._in_replay = streams, [*tensors], in_replay
        self._device, self._clock = stream.device, dict(stream.clock)

    def wait(self, timeout: Any = None) -> bool:
        with self._streams.lock:
            current, capture = self._streams.current(self._device), self._streams.capture
            if self._in_replay is not None:
                assert capture is not None, "a wait outside for what began inside a capture"
                capture.replays.append(self._in_replay)
            elif capture is not None and capture.holds(current.clock):
                capture.refuse("a wait for a message from outside the capture")
            current.learn(self._clock)
        self._tensors.clear()
        return True

    def is_completed(self) -> bool:
        raise AssertionError("the host asks whether an operation of a GPU has ended")


class _Communicator:
    """The queue of operations between some ranks of a group."""

    def __init__(self, group: "OrderedGroup", gloo: Any) -> None:
        self._memory, self._streams, self._gloo = group.memory, group.streams, gloo
        self._aborted = group.aborted
        self._stream = Stream(self._streams, self._streams.index())
        self._jobs: SimpleQueue[tuple[_Job, Any, threading.Event]] = SimpleQueue()
        threading.Thread(target=self._serve, name="penstock-mesh-ordered", daemon=True).start()

    def begin(self, job: _Job, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> _Work:
        """Queue an operation behind the work that the current stream has so far."""
        streams, stream = self._streams, self._stream
        if streams.capture is not None:
            return self._capture(job, reads, writes)
        with streams.lock:
            stream.learn(streams.current(stream.device).clock)
            before, count = dict(stream.clock), stream.issue()
            for tensors, use in ((reads, self._memory.read), (writes, self._memory.write)):
                for tensor in tensors:
                    block = self._memory.block_of(tensor)
                    assert block is not None, "a tensor of the CPU in an operation of the GPU"
                    use(block, stream, count, "an operation between processes")
            ended = streams.begin(stream, count)
            self._jobs.put((job, before, ended))
            return _Work(streams, stream, [*reads, *writes])

    def _capture(self, job: _Job, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> _Work:
        """Let each replay queue an operation, in the order of the capture."""
        streams, stream, latest = self._streams, self._stream, list[threading.Event]()
        capture: Any = streams.capture

        def again() -> None:
            latest[:] = [threading.Event()]
            self._jobs.put((job, {}, latest[0]))

        with streams.lock:
            stream.learn(streams.current(stream.device).clock)
            capture.use(stream, reads, writes)
            capture.replays.append(again)
            return _Work(streams, stream, [*reads, *writes], lambda: latest[0].wait())

    def _serve(self) -> None:
        while True:
            job, before, ended = self._jobs.get()
            self._streams.settle(before)
            try:
                with _disable_current_modes():  # what gloo copies is noted already
                    job(self._gloo).wait()
            except RuntimeError:  # the peer is gone: NCCL waits for it until it is aborted
                self._aborted.wait()
            ended.set()
            del job, before, ended


class _All:
    """Several works of gloo."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class OrderedGroup(_ProcessGroup):
    """The group; tensors of the CPU go by gloo at once."""

    def __init__(self, memory: Memory, store: Any, rank: int, size: int, limit: Any) -> None:
        super().__init__(rank, size)
        self.memory, self.streams = memory, memory.streams
        self._store, self._limit = store, limit
        self._on_cpu = self._new_gloo("cpu", rank, size)
        self._communicators: dict[tuple[int, ...], _Communicator] = {}
        self._opened: list[Any] = []
        self.aborted = threading.Event()

    def _new_gloo(self, name: str, rank: int, size: int) -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), rank, size, self._limit)

    def _between(self, *ranks: int) -> _Communicator:
        """Return the communicator of some ranks, made by all of them at its first use."""
        key = tuple(sorted(ranks))
        if key not in self._communicators:
            gloo = self._new_gloo(f"between {key}", key.index(self.rank()), len(key))
            self._opened.append(gloo)
            self._communicators[key] = _Communicator(self, gloo)
        return self._communicators[key]

    def _run(self, job: _Job, reads: Sequence[Tensor], writes: Sequence[Tensor] = ()) -> Any:
        """Run a collective."""
        if all(tensor.is_cpu for tensor in (*reads, *writes)):
            return job(self._on_cpu)
        return self._between(*range(self.size())).begin(job, reads, writes)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        def job(gloo: Any) -> Any:
            number = int(peer > self.rank())
            gloo.recv([torch.empty(1)], number, 1).wait()  # the receiver has come to it
            return gloo.send(tensors, number, 0)

        return self._between(self.rank(), peer).begin(job, tensors, ())

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        def job(gloo: Any) -> Any:
            number = int(peer > self.rank())
            gloo.send([torch.empty(1)], number, 1).wait()
            return gloo.recv(tensors, number, 0)

        return self._between(self.rank(), peer).begin(job, (), tensors)

    def batch(self, messages: Sequence[Any]) -> Any:
        """Run sends and receives together, in the queue that all ranks have: as an NCCL group."""
        sends = [(m.tensor, m.group_peer) for m in messages if m.op is dist.isend]
        rooms = [(m.tensor, m.group_peer) for m in messages if m.op is dist.irecv]

        def job(gloo: Any) -> Any:
            works = []
            for room, peer in rooms:
                works += [gloo.send([torch.empty(1)], peer, 1), gloo.recv([room], peer, 0)]
            for content, peer in sends:
                gloo.recv([torch.empty(1)], peer, 1).wait()  # the receiver has come to it
                works.append(gloo.send([content], peer, 0))
            return _All(works)

        reads, writes = ([tensor for tensor, _ in its] for its in (sends, rooms))
        return self._between(*range(self.size())).begin(job, reads, writes)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._run(lambda gloo: gloo.allreduce(tensors, options), (), tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._run(lambda gloo: gloo.broadcast(tensors, options), (), tensors)

    def allgather(self, rows: Any, tensors: list[Tensor], options: Any = None) -> Any:
        return self._run(lambda gloo: gloo.allgather(rows, tensors), tensors, [*chain(*rows)])

    def all_to_all_single(self, output: Tensor, given: Tensor, *sizes: Any) -> Any:
        split = sizes[:2]
        return self._run(lambda gloo: gloo.alltoall_base(output, given, *split), [given], [output])

    alltoall_base = all_to_all_single  # its name in torch 2.11

    def abort(self) -> None:
        """End all operations, now and later."""
        self.aborted.set()
        for gloo in self._opened:
            gloo.abort()


@contextmanager
def ordered_groups(memory: Memory) -> Iterator[None]:
    """Let processes with a pretended GPU each use such groups, by torch's public functions."""
    streams, backends = memory.streams, dist.Backend

    def make(store: Any, rank: int, size: int, limit: Any) -> OrderedGroup:
        return OrderedGroup(memory, store, rank, size, limit)

    def batch(messages: Sequence[Any]) -> list[Any]:
        (group,) = {message.group for message in messages}
        return [group.batch(messages)]

    backends.register_backend(NAME, make, devices=["cpu", "cuda"])
    replaced: dict[str, Any] = {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: streams.num_devices,
        "set_device_index": streams.set_device,
        "current_stream": streams.current,
        "synchronize": streams.synchronize,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.accelerator, **replaced))
        stack.enter_context(patch.object(dist, "batch_isend_irecv", batch))
        stack.enter_context(patch.object(torch, "Stream", lambda device: Stream(streams, device)))
        stack.enter_context(patch.dict(backends.default_device_backend_map, cuda=NAME))
        yield
