"""1F1B: GPipe's length with at most p - s live micro-batches on stage s (PipeDream-Flush).

Eager 1F1B: forwards run ahead, so that no stage waits for a message on its way.

GPipe: all forwards, then all backwards (Huang et al. 2019, section 2.2).
"""

from collections.abc import Iterator, Sequence

from .family import Family
from .ir import Backward, Forward, Instruction, Schedule


def _schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Alternate one forward with one backward, so stage s keeps at most p - s micro-batches.

    p = 3, m = 4:   stage 0 | F0 F1 F2 B0 F3 B1 B2 B3
                    stage 1 | F0 F1 B0 F2 B1 F3 B2 B3
                    stage 2 | F0 B0 F1 B1 F2 B2 F3 B3
    """
    return _alternating([num_stages - stage - 1 for stage in range(num_stages)], num_microbatches)


one_f_one_b = Family("one_f_one_b", _schedule)
"""1F1B, the default: a rank alternates one forward with one backward after its warm-up."""


def _alternating(warmups: Sequence[int], num_microbatches: int) -> Schedule:
    """Begin each stage with `warmups[stage]` forwards, then alternate, then drain."""

    def program(stage: int, warmup: int) -> Iterator[Instruction]:
        for i in range(warmup):
            yield Forward(stage, i)
        for i in range(num_microbatches - warmup):
            yield Forward(stage, warmup + i)
            yield Backward(stage, i)
        for i in range(num_microbatches - warmup, num_microbatches):
            yield Backward(stage, i)

    return Schedule.of(
        program(stage, min(warmup, num_microbatches)) for stage, warmup in enumerate(warmups)
    )


def _eager(num_stages: int, num_microbatches: int) -> Schedule:
    """Alternate like 1F1B, with nearly twice the forwards ahead: 2(p - s) - 1 on stage s.

    In 1F1B each stage waits for its neighbours' messages.  Here an activation has a whole turn
    of the stage before it to arrive.  Stage s keeps p - s - 1 more live micro-batches for that.
    From Zhuang et al. 2022, "On Optimizing the Communication of Model Parallelism", section 4.

    p = 3, m = 4:   stage 0 | F0 F1 F2 F3 B0 B1 B2 B3
                    stage 1 | F0 F1 F2 B0 F3 B1 B2 B3
                    stage 2 | F0 B0 F1 B1 F2 B2 F3 B3
    """
    return _alternating(
        [2 * (num_stages - stage - 1) for stage in range(num_stages)], num_microbatches
    )


eager_1f1b = Family("eager_1f1b", _eager)
"""1F1B with a longer warm-up, so that messages arrive before they are needed."""


def _gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Run every forward, then every backward; a stage keeps all m micro-batches.

    p = 3, m = 4:   stage 0 | F0 F1 F2 F3             B0 B1 B2 B3
                    stage 1 |    F0 F1 F2 F3       B0 B1 B2 B3
                    stage 2 |       F0 F1 F2 F3 B0 B1 B2 B3

    Backwards run in micro-batch order, not reversed as in the paper.  Gradients then add up in the
    order of the unsplit model, bit by bit.  The length of the step is the same.
    """
    return _alternating([num_microbatches] * num_stages, num_microbatches)


gpipe = Family("gpipe", _gpipe)
"""GPipe: all forwards, then all backwards.  A rank keeps all M micro-batches."""
