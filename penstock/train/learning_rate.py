"""The learning rate as a function of the step: a resumed run needs no scheduler state."""

import math


def warmup_cosine(
    step: int, *, num_steps: int, warmup_steps: int, peak: float, final_share: float
) -> float:
    """Give the learning rate of `step` (from 0): up in a line to `peak`, down in half a cosine.

    Ends at `final_share` of `peak`, which step number `num_steps` would have.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / (num_steps - warmup_steps)
    return peak * (
        final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    )
