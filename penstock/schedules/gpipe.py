"""GPipe: all forwards, then all backwards (Huang et al. 2019, section 2.2)."""

from collections.abc import Iterator

from .family import Family
from .ir import Backward, Forward, Instruction, Schedule


def _schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Run every forward, then every backward; a stage keeps all m micro-batches.

    p = 3, m = 4:   stage 0 | F0 F1 F2 F3             B0 B1 B2 B3
                    stage 1 |    F0 F1 F2 F3       B0 B1 B2 B3
                    stage 2 |       F0 F1 F2 F3 B0 B1 B2 B3

    Backwards run in micro-batch order, not reversed as in the paper.  Gradients then add up in the
    order of the unsplit model, bit by bit.  The length of the step is the same.
    """

    def program(stage: int) -> Iterator[Instruction]:
        for i in range(num_microbatches):
            yield Forward(stage, i)
        for i in range(num_microbatches):
            yield Backward(stage, i)

    return Schedule.of(program(stage) for stage in range(num_stages))


gpipe = Family("gpipe", _schedule)
"""GPipe: all forwards, then all backwards.  A rank keeps all M micro-batches."""
