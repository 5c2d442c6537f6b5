"""What was measured while training: speed, and the steps whose instructions were recorded."""

from dataclasses import dataclass, field
from statistics import median

from penstock import Timeline, Trace


@dataclass(slots=True)
class Meter:
    """Measurements of one process; they are shown and written, and never change the training."""

    trace_every: int
    seconds: float = 0.0
    num_samples: int = 0
    timeline: Timeline | None = None
    """The newest timed step."""
    step_s: float | None = None
    """How long it took with what lies outside of its timeline; None where it has other parts."""
    optimizer_s: float = 0.0
    """Of that, what moving the weights took outside of its timeline."""
    memory: Timeline | None = None
    """The step whose memory was traced: the second."""
    peak_bytes: dict[int, int] = field(default_factory=dict)
    """By stage; of the second step."""
    bubbles: list[float] = field(default_factory=list)
    shares_of_ideal: list[float] = field(default_factory=list)
    _steps: int = 0

    def choose_trace(self, *, full_batch: bool) -> Trace:
        """Say what the next step should record."""
        if self._steps == 0 or not full_batch:
            return Trace.OFF  # the first step warms up: it is slower and keeps more than others
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
        """Note a step; `timeline` is what it recorded, if anything.

        `optimizer_s` is what moving the weights took outside of it; None where the timeline is
        that of one of several parts of the step.
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
        """Samples per second of steps, but for the first and the one that traced memory."""
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def bubble(self) -> float | None:
        """Median over the timed steps."""
        return median(self.bubbles) if self.bubbles else None

    @property
    def share_of_ideal(self) -> float | None:
        """Median over the timed steps."""
        return median(self.shares_of_ideal) if self.shares_of_ideal else None
