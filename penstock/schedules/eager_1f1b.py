"""Eager 1F1B: forwards run ahead, so that no stage waits for a message on its way."""

from .family import Family
from .ir import Schedule
from .one_f_one_b import alternating


def _schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Alternate like 1F1B, with nearly twice the forwards ahead: 2(p - s) - 1 on stage s.

    In 1F1B each stage waits for its neighbours' messages.  Here an activation has a whole turn
    of the stage before it to arrive.  Stage s keeps p - s - 1 more live micro-batches for that.
    From Zhuang et al. 2022, "On Optimizing the Communication of Model Parallelism", section 4.

    p = 3, m = 4:   stage 0 | F0 F1 F2 F3 B0 B1 B2 B3
                    stage 1 | F0 F1 F2 B0 F3 B1 B2 B3
                    stage 2 | F0 B0 F1 B1 F2 B2 F3 B3
    """
    return alternating(
        [2 * (num_stages - stage - 1) for stage in range(num_stages)], num_microbatches
    )


eager_1f1b = Family("eager_1f1b", _schedule)
"""1F1B with a longer warm-up, so that messages arrive before they are needed."""
