"""Who wrote, read and freed each storage on which stream; a race is two uses that nothing orders.

A storage that is freed goes back to the stream that allocated it.  That stream may use the memory
again at once, beside other streams that still read it.  `record_stream` delays the return until
the recorded stream has done what was issued to it.
"""

import traceback
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from .streams import Clock, Stream, Streams, Timeline


@dataclass(slots=True, eq=False)
class Block:
    """The memory of one storage: where it is, who allocated it, and its uses.

    `write` is the last write and `reads` are the reads since, by timeline.  The allocator waits
    for the streams in `recorded` before it uses the memory again.  `watch` sees the storage end.
    """

    device: torch.device
    home: Timeline
    write: Clock = field(default_factory=dict)
    reads: Clock = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)
    watch: Any = None


class Memory:
    """The blocks of all storages that streams use, and the races found so far."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._blocks: dict[int, Block] = {}
        self._freed: dict[Timeline, list[tuple[Clock, str]]] = {}
        self.races: list[str] = []
        self.num_uses = self.num_reuses = 0

    def block_in(self, storage: UntypedStorage) -> Block | None:
        """Return the block of a storage; None for memory that only the host uses."""
        return self._blocks.get(storage._cdata)

    def block_of(self, tensor: Tensor) -> Block | None:
        """Return the block of a tensor; None too for a tensor without one storage."""
        if tensor.layout is not torch.strided:
            return None
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def allocate(self, tensor: Tensor, device: torch.device, home: Timeline) -> None:
        """Place the storage of a new tensor on a device, in memory of the timeline `home`."""
        # The home may get any memory that came back to it, whose other users may still run.
        for uses, where in self._freed.pop(home, ()):
            self.num_reuses += 1
            for number in home.unknown(uses):
                self._race(
                    f"{home.name} may use memory again that {self.streams.name(number)} still "
                    f"uses; freed in {where}"
                )
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = Block(device, home, {home.number: home.clock.get(home.number, 0)})
        block.watch = weakref.ref(storage, lambda _: self._free(key))
        self._blocks[key] = block

    def read(self, block: Block, reader: Timeline, count: int, what: str) -> None:
        """Note a read, of a reader's work number `count`."""
        self._check(block.write, reader, f"{what} on {reader.name} reads what", "wrote")
        block.reads[reader.number] = count

    def write(self, block: Block, writer: Timeline, count: int, what: str) -> None:
        """Note a write, of a writer's work number `count`."""
        self._check(block.write, writer, f"{what} on {writer.name} overwrites what", "wrote")
        self._check(block.reads, writer, f"{what} on {writer.name} overwrites what", "reads")
        block.write, block.reads = {writer.number: count}, {}

    def _check(self, uses: Clock, user: Timeline, does: str, did: str) -> None:
        self.num_uses += 1
        for number in user.unknown(uses):
            self._race(f"{does} {self.streams.name(number)} {did}, and does not wait for it")

    def _free(self, key: int) -> None:
        """Give a block back to its home, with the uses that the allocator does not wait for."""
        with self.streams.lock:
            block = self._blocks.pop(key)
            if block.device.type == "cpu":
                return  # the allocator of pinned memory waits for copies by itself
            awaited = Timeline("the allocator", block.device)
            for stream in block.recorded:
                awaited.learn(stream.clock)
            uses = block.write | block.reads
            home = block.home.number
            left = {n: uses[n] for n in awaited.unknown(uses) if n != home}
            if left:
                self._freed.setdefault(block.home, []).append((left, _where()))

    def _race(self, what: str) -> None:
        self.races.append(f"{what}; in {_where()}")


def _where() -> str:
    """Return the innermost places of the call that are not torch's or this package's."""
    frames = [
        f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_stack(limit=60)
        if "/pretend_devices/test_" in frame.filename or "/penstock/" in frame.filename
    ]
    return " < ".join(reversed(frames[-4:])) or "a test"
