"""What a traced step noted, kept raw: the timeline is made from it when someone looks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.schedules.ir import Schedule, sent_message
from penstock.trace.timeline import MemorySample, Span, Timeline


@dataclass(frozen=True, slots=True)
class Record:
    """The programs that ran; on each rank the start and end of every instruction, in turn, and the
    bytes of every message that it sent.
    """

    schedule: Schedule
    times_s: Mapping[int, Sequence[float]]
    sent_bytes: Mapping[int, Sequence[int]]
    memory: Sequence[MemorySample]

    def timeline(self) -> Timeline:
        """Make the timeline, with time 0 at the first instruction's start."""
        zero_s = min((times[0] for times in self.times_s.values() if times), default=0.0)
        return Timeline(
            spans=tuple(
                span for rank in sorted(self.times_s) for span in self._spans(rank, zero_s)
            ),
            memory=tuple(replace(sample, time_s=sample.time_s - zero_s) for sample in self.memory),
        )

    def _spans(self, rank: int, zero_s: float) -> Iterator[Span]:
        times, sent = self.times_s[rank], iter(self.sent_bytes[rank])
        for n, instruction in enumerate(self.schedule.programs[rank]):
            num_bytes = 0 if sent_message(instruction) is None else next(sent)
            start_s, end_s = times[2 * n] - zero_s, times[2 * n + 1] - zero_s
            yield Span(rank, instruction, start_s, end_s, num_bytes)
