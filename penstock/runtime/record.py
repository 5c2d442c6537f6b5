"""What a traced step noted, kept raw: the timeline is made from it when someone looks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.schedules.ir import Schedule
from penstock.trace.timeline import MemorySample, Span, Timeline


@dataclass(frozen=True, slots=True)
class Record:
    """The programs that ran, and on each rank the start and end of every instruction, in turn."""

    schedule: Schedule
    times_s: Mapping[int, Sequence[float]]
    memory: Sequence[MemorySample]

    def timeline(self) -> Timeline:
        """Make the timeline, with time 0 at the first instruction's start."""
        zero_s = min((times[0] for times in self.times_s.values() if times), default=0.0)
        return Timeline(
            spans=tuple(
                Span(rank, instruction, times[2 * n] - zero_s, times[2 * n + 1] - zero_s)
                for rank, times in sorted(self.times_s.items())
                for n, instruction in enumerate(self.schedule.programs[rank])
            ),
            memory=tuple(
                MemorySample(sample.stage, sample.time_s - zero_s, sample.kept_bytes)
                for sample in self.memory
            ),
        )
