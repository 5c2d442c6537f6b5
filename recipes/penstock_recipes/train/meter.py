"""Measure training: throughput, and timelines of the traced steps."""

from dataclasses import dataclass, field
from statistics import median

from penstock import Timeline, Trace


@dataclass(slots=True)
class Meter:
    """Measurements of one process; they never change the training."""

    trace_every: int
    seconds: float = 0.0
    num_samples: int = 0
    timeline: Timeline | None = None
    """The newest timed step."""
    step_s: float | None = None
    """Seconds of that whole step; None if the timeline shows only one of its parts."""
    optimizer_s: float = 0.0
    """Seconds of that step's weight update outside of its timeline."""
    memory: Timeline | None = None
    """The step whose memory was traced: the second."""
    peak_bytes: dict[int, int] = field(default_factory=dict)
    """Peak activation memory of each stage in the second step."""
    bubbles: list[float] = field(default_factory=list)
    """The bubble of each timed step, from 0 to 1."""
    shares_of_ideal: list[float] = field(default_factory=list)
    _steps: int = 0

    def choose_trace(self, *, full_batch: bool) -> Trace:
        """Choose the trace of the next step."""
        if self._steps == 0 or not full_batch:
            return Trace.OFF  # the first step is slower, and its memory is higher
        if not self.peak_bytes:
            return Trace.MEMORY
        due = self._steps % self.trace_every == 0 or self.timeline is None
        return Trace.TIME if due else Trace.OFF

    def add_step(
        self,
        seconds: float,
        num_samples: int,
        timeline: Timeline | None,
        optimizer_s: float | None = None,
    ) -> None:
        """Record a step, with its timeline if it was traced.

        `optimizer_s` is the weight update outside of the timeline; None if the timeline shows
        only one of several parts of the step.
        """
        self._steps += 1
        if timeline is not None and timeline.memory:
            self.peak_bytes, self.memory = timeline.peak_bytes(), timeline
        if self._steps == 1 or (timeline is not None and timeline.memory):
            return
        self.seconds += seconds
        self.num_samples += num_samples
        if timeline is not None:
            breakdown = timeline.breakdown()
            self.timeline = timeline
            self.step_s = None if optimizer_s is None else seconds
            self.optimizer_s = optimizer_s or 0.0
            self.bubbles.append(float(breakdown.bubble))
            self.shares_of_ideal.append(float(breakdown.share_of_ideal))

    @property
    def samples_per_s(self) -> float:
        """Samples per second, without the first step and the step that traced memory."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def bubble(self) -> float | None:
        """Median bubble of the timed steps, from 0 to 1."""
        return median(self.bubbles) if self.bubbles else None

    @property
    def share_of_ideal(self) -> float | None:
        """Median share of the ideal speed over the timed steps, from 0 to 1."""
        return median(self.shares_of_ideal) if self.shares_of_ideal else None
