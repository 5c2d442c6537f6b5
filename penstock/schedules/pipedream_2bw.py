"""PipeDream-2BW: no flush, gradients one mini-batch old, two versions (Narayanan et al. 2021)."""

from .family import Family, Updates
from .ir import Schedule
from .laws import ASYNCHRONOUS
from .laws.updates import Sees
from .pipedream import without_flush


def _schedule(num_stages: int, num_microbatches: int, num_minibatches: int) -> Schedule:
    """Alternate forwards with backwards over all mini-batches; update after each one's last.

    Mini-batch t sees the weights after t - 1 updates, on every stage; the first two see those at
    the start.  So a stage has two versions at most.

    p = 3, m = 2, 3 mini-batches:

    stage 0 | F0 F1 F2 B0 F3 B1 U F4@1 B2 F5@1 B3 U B4 B5 U
    stage 1 | F0 F1 B0 F2 B1 U F3 B2 F4@1 B3 U F5@1 B4 B5 U
    stage 2 | F0 B0 F1 B1 U F2 B2 F3 B3 U F4@1 B4 F5@1 B5 U

    With fewer micro-batches than stages, a forward waits until its version is there.
    """
    number = num_microbatches * num_minibatches
    return without_flush(
        num_stages,
        number,
        num_microbatches,
        lambda stage, i: _version(stage, i, num_microbatches, num_stages),
    )


def _version(stage: int, microbatch: int, per_update: int, num_stages: int) -> int:
    return max(microbatch // per_update - 1, 0)


pipedream_2bw = Family(
    "pipedream_2bw",
    _schedule,
    laws=(*ASYNCHRONOUS, Sees(_version)),
    updates=Updates.EACH_MINIBATCH,
)
"""PipeDream-2BW: no flush, gradients one mini-batch old, two versions of the weights."""
