"""Record a traced step in raw form; make its timeline when it is asked for.

Each process records by its own clock.  Processes on one host share a clock.  Between hosts, times
are aligned at the moment when each process had heard from all others before the step.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.mesh import Mesh
from penstock.schedules.ir import Schedule, sent_message
from penstock.trace.timeline import MemorySample, Span, Timeline
from penstock.types import Trace, word_of

from .run import Recorded


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """The record of a traced step in one process.

    `times_s` has for each rank the start and end of all instructions in order; `sent_bytes` the
    bytes of each message.  Processes with the same `clock` share it; a clock None is shared with
    no process.  `agreed_s` is the time when this process had heard from all others.
    """

    clock: str | None
    agreed_s: float
    times_s: dict[int, list[float]]
    sent_bytes: dict[int, list[int]]
    memory: list[MemorySample]

    def by_the_clock_of(self, other: "ProcessRecord") -> "ProcessRecord":
        """Return the record with its times on the clock of `other`."""
        if self.clock is not None and self.clock == other.clock:
            return self
        # Both clocks are read at one moment: when the last process had been heard from.
        later_s = other.agreed_s - self.agreed_s
        return ProcessRecord(
            other.clock,
            other.agreed_s,
            {rank: [time_s + later_s for time_s in times] for rank, times in self.times_s.items()},
            self.sent_bytes,
            [replace(sample, time_s=sample.time_s + later_s) for sample in self.memory],
        )


@dataclass(frozen=True, slots=True)
class Record:
    """The programs of a traced step, and the records of all stages."""

    schedule: Schedule
    noted: ProcessRecord

    def timeline(self) -> Timeline:
        """Make the timeline, with time 0 at the first instruction's start."""
        zero_s = min((times[0] for times in self.noted.times_s.values() if times), default=0.0)
        return Timeline(
            spans=tuple(
                span for rank in sorted(self.noted.times_s) for span in self._spans(rank, zero_s)
            ),
            memory=tuple(
                replace(sample, time_s=sample.time_s - zero_s) for sample in self.noted.memory
            ),
        )

    def _spans(self, rank: int, zero_s: float) -> Iterator[Span]:
        times, sent = self.noted.times_s[rank], iter(self.noted.sent_bytes[rank])
        for n, instruction in enumerate(self.schedule.programs[rank]):
            num_bytes = 0 if sent_message(instruction) is None else next(sent)
            start_s, end_s = times[2 * n] - zero_s, times[2 * n + 1] - zero_s
            yield Span(rank, instruction, start_s, end_s, num_bytes)


def gather_noted(mesh: Mesh, recorded: Recorded, agreed_s: float) -> ProcessRecord:
    """Gather the records of a traced run from all stages of this replica."""
    times_s, sent_bytes, memory = recorded.times_s, recorded.sent_bytes, recorded.memory
    mine = ProcessRecord(clock_name(), agreed_s, times_s, sent_bytes, memory)
    records = mesh.stages.gather(mine if mesh.speaks else None, "for what the other stages traced")
    return put_together([part for part in records if part is not None], mine)


def put_together(parts: Sequence[ProcessRecord], mine: ProcessRecord) -> ProcessRecord:
    """Merge the records of all processes, on this process's clock."""
    aligned = [part.by_the_clock_of(mine) for part in parts]
    return replace(
        mine,
        times_s={rank: times for part in aligned for rank, times in part.times_s.items()},
        sent_bytes={rank: sent for part in aligned for rank, sent in part.sent_bytes.items()},
        memory=[sample for part in aligned for sample in part.memory],
    )


def clock_name() -> str | None:
    """Return a name of the clock of time.perf_counter, by which processes share it, or None."""
    namespace = ""
    with suppress(OSError):
        namespace = str(Path("/proc/self/ns/time").readlink())
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + namespace
    except OSError:
        return None


def as_trace(trace: Trace | str | bool) -> Trace:
    """Return the `Trace` of a word or a bool (True: Trace.TIME); ConfigError if there is none."""
    if isinstance(trace, bool):
        return Trace.TIME if trace else Trace.OFF
    return word_of("trace", trace, Trace, ", or True")
