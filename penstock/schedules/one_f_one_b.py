"""1F1B: GPipe's length with at most p - s live micro-batches on stage s (PipeDream-Flush)."""

from collections.abc import Iterator, Sequence

from .family import Family
from .ir import Backward, Forward, Instruction, Schedule


def _schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Alternate one forward with one backward, so stage s keeps at most p - s micro-batches.

    p = 3, m = 4:   stage 0 | F0 F1 F2 B0 F3 B1 B2 B3
                    stage 1 | F0 F1 B0 F2 B1 F3 B2 B3
                    stage 2 | F0 B0 F1 B1 F2 B2 F3 B3
    """
    return alternating([num_stages - stage - 1 for stage in range(num_stages)], num_microbatches)


one_f_one_b = Family("one_f_one_b", _schedule)
"""1F1B, the default: a rank alternates one forward with one backward after its warm-up."""


def alternating(warmups: Sequence[int], num_microbatches: int) -> Schedule:
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
