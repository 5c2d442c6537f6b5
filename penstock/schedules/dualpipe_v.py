"""DualPipeV: on a V, forwards of one direction take turns with backwards of the other.

The order is that of DeepSeek-AI 2025, https://github.com/deepseek-ai/DualPipe.  It needs half of
DualPipe's ranks, as Qi et al. 2024 show in "Pipeline Parallelism with Controllable Memory".
"""

from collections import deque
from collections.abc import Iterator
from itertools import count

from .family import Family, zigzag
from .ir import Backward, BackwardInput, BackwardWeight, Compute, Forward, Schedule


def _schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """Run two stages on each of R ranks, there and back, one forward for each whole backward.

    p = 4 stages, v = 2 of them on each of R = 2 ranks, m = 4:

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
    rank 1 | 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3

    In the middle a forward of one stage of a rank always stands next to a backward of the other:
    the message of each travels while the other runs.  Backwards are in two parts only at the
    start and the end of a rank.

    A rank keeps up to 2 R + 1 micro-batches of its two stages.  If forwards and both parts of
    backwards all take the same time F, a step takes 6 m + R - 1 times F from m = 2 R on, as that
    of `zb_v`.  With fewer micro-batches the order is that of 2 R with those beyond m struck out.
    """
    num_ranks = num_stages // 2
    whole = max(num_microbatches, 2 * num_ranks)
    return Schedule.of(
        (x for x in _program(rank, num_ranks, whole) if x.microbatch < num_microbatches)
        for rank in range(num_ranks)
    )


dualpipe_v = Family("dualpipe_v", _schedule, stages_per_rank=2, deal=zigzag)
"""DualPipeV: two stages on each rank, with forwards of one between backwards of the other."""


def _program(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Compute]:
    """Number the words of a rank: 0 is its stage on the way there, 1 that on the way back."""
    stages = rank, 2 * num_ranks - 1 - rank
    forwards, backwards = (count(), count()), (count(), count())
    left: deque[Compute] = deque()
    # `left` is the queue of weights' parts: a W runs the oldest
    for word in _words(rank, num_ranks - rank - 1, num_microbatches - 2 * num_ranks):
        if word == "W":
            yield left.popleft()
            continue
        way = int(word[1])
        stage, numbers = stages[way], (forwards if word[0] == "F" else backwards)[way]
        microbatch = next(numbers)
        yield _KINDS[word[0]](stage, microbatch)
        if word[0] == "I":
            left.append(BackwardWeight(stage, microbatch))


_KINDS = {"F": Forward, "B": Backward, "I": BackwardInput}


def _words(before: int, after: int, more: int) -> list[str]:
    """Write the order of a rank with `before` and `after` others on the way there.

    The order fills all ranks without the `more` micro-batches.
    """
    return [
        # warm-up: forwards of both ways, then the first gradients
        *["F0"] * (2 * after),
        *["F0", "F1"] * (before + 1),
        *["I1", "W", "F1"] * after,
        # steady state: one forward and one backward of each way
        *["F0", "B1", "F1", "B0"] * (more + before + 1),
        # drain: the last forwards, then backwards in two parts
        *["B1", "F1", "B0"] * after,
        *[("B" if n <= before else "I") + "10"[n % 2] for n in range(2 * before + 2)],
        *["W", "I0"] * after,
        *["W"] * (before + 1),
    ]
