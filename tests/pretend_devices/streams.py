"""Streams and events with vector clocks, instead of a GPU's.

    stream A   1 ──── 2 ──── 3             A's clock at 3: {A: 3}
                      │ event
    stream B          └────► 1 ──── 2      B's clock at 2: {A: 2, B: 2}

A stream does its work in order.  It knows of other work only by waits: work 3 of A may run at any
time beside work 2 of B, whatever the order in which Python issued them.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

Clock = dict[int, int]
"""The last work of each stream, by its number, that is known to be done."""


class Timeline:
    """Work in order, on a stream or on the host; `clock` has all that is done before what follows.

    The host's timeline is one for all threads: what one thread has waited for counts as known to
    all.
    """

    _numbers = itertools.count()

    def __init__(self, name: str, device: torch.device) -> None:
        self.number = next(self._numbers)
        self.name, self.device = name, device
        self.clock: Clock = {}

    def learn(self, clock: Clock) -> None:
        """Let the work that follows come after all work in `clock`."""
        for number, count in clock.items():
            self.clock[number] = max(count, self.clock.get(number, 0))

    def issue(self) -> int:
        """Issue one piece of work; return its count."""
        self.clock[self.number] = count = self.clock.get(self.number, 0) + 1
        return count

    def unknown(self, uses: Clock) -> list[int]:
        """Return the numbers of timelines whose uses may still run beside the next work."""
        return [n for n, count in uses.items() if self.clock.get(n, 0) < count]


class Stream(Timeline):
    """A stream of a pretended GPU; its work comes after all that the host waited for before."""

    def __init__(self, streams: "Streams", device: Any = None, priority: int = 0) -> None:
        self._streams, where = streams, torch.device("cuda", streams.index(device))
        with streams.lock:
            super().__init__(f"stream {len(streams.every)} of {where}", where)
            streams.every.append(self)

    def issue(self) -> int:
        self.learn(self._streams.host.clock)
        return super().issue()

    def wait_event(self, event: "Event") -> None:
        with self._streams.lock:
            if self._streams.capture is not None:
                self._streams.capture.check_waits(self.clock, event.clock)
            self.learn(event.clock)

    def wait_stream(self, other: "Stream") -> None:
        with self._streams.lock:
            if self._streams.capture is not None:
                self._streams.capture.check_waits(self.clock, other.clock)
            self.learn(other.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self._streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._streams.host_waits(self.clock)

    def __enter__(self) -> "Stream":
        self._streams.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.leave()


class Event:
    """A CUDA event; one that was never recorded is reached at once, as CUDA's is."""

    def __init__(self, streams: "Streams", enable_timing: bool = False) -> None:
        self._streams, self.clock, self._at_s = streams, Clock(), 0.0

    def record(self, stream: Stream | None = None) -> None:
        with self._streams.lock:
            self.clock = dict((stream or self._streams.current()).clock)
        self._at_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._streams.current()).wait_event(self)

    def synchronize(self) -> None:
        self._streams.host_waits(self.clock)

    def elapsed_time(self, end: "Event") -> float:
        """Return the milliseconds between the records of two events."""
        return (end._at_s - self._at_s) * 1e3


class _Here(threading.local):
    """The current device of a thread, and the current streams that are not the default ones."""

    def __init__(self) -> None:
        self.device = 0
        self.current: dict[int, Stream] = {}
        self.entered: list[tuple[int, dict[int, Stream]]] = []


class Streams:
    """The streams of all pretended GPUs, and the host's timeline."""

    def __init__(self, num_devices: int) -> None:
        self.num_devices, self._here, self.lock = num_devices, _Here(), threading.RLock()
        self.host = Timeline("the host", torch.device("cpu"))
        self.every: list[Stream] = []
        self._under_way: dict[tuple[int, int], threading.Event] = {}
        self.capture: Any = None
        """The `graphs.Capture` under way."""
        self._defaults = [Stream(self, index) for index in range(num_devices)]

    def index(self, device: Any = None) -> int:
        """Return the number of a device; that of the current one for None or `cuda`."""
        index = torch.device(device).index if isinstance(device, str | torch.device) else device
        return self._here.device if index is None else int(index)

    def set_device(self, device: Any) -> None:
        """Make a device the current one of this thread."""
        self._here.device = self.index(device)

    def default(self, device: Any = None) -> Stream:
        return self._defaults[self.index(device)]

    def current(self, device: Any = None) -> Stream:
        index = self.index(device)
        return self._here.current.get(index, self._defaults[index])

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        """Make a device the current one inside."""
        before, self._here.device = self._here.device, self.index(device)
        try:
            yield
        finally:
            self._here.device = before

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream the current one of its device inside, and its device the current one."""
        self.enter(stream)
        try:
            yield
        finally:
            self.leave()

    def enter(self, stream: Stream) -> None:
        """Do as the begin of `on_stream`."""
        here, index = self._here, self.index(stream.device)
        here.entered.append((here.device, here.current))
        here.device, here.current = index, {**here.current, index: stream}

    def leave(self) -> None:
        """Do as the end of `on_stream`."""
        self._here.device, self._here.current = self._here.entered.pop()

    # -- work that other processes take part in: it ends later than it is issued ---------------

    def begin(self, stream: Stream, count: int) -> threading.Event:
        """Note that a stream's work is under way, until the returned event is set."""
        with self.lock:
            self._under_way[stream.number, count] = ended = threading.Event()
        return ended

    def settle(self, clock: Clock) -> None:
        """Wait until all work in a clock has truly ended; nobody may hold the lock."""
        with self.lock:
            waits = [key for key in self._under_way if clock.get(key[0], 0) >= key[1]]
            events = [self._under_way[key] for key in waits]
        for key, ended in zip(waits, events, strict=True):
            ended.wait()
            self._under_way.pop(key, None)

    def host_waits(self, clock: Clock) -> None:
        """Let the host wait for all work in a clock."""
        if self.capture is not None:
            self.capture.refuse("the host waits for a stream or an event")
        self.settle(clock)
        with self.lock:
            self.host.learn(clock)

    def synchronize(self, device: Any = None) -> None:
        """Let the host wait for all streams of a device."""
        for stream in list(self.every):
            if stream.device.index == self.index(device):
                self.host_waits(stream.clock)

    def name(self, number: int) -> str:
        """Return the name of a timeline, for messages."""
        return next((s.name for s in self.every if s.number == number), self.host.name)
