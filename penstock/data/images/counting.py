"""How many samples a classifier has right: its best guess, or one of its best few."""

from collections.abc import Sequence

from torch import Tensor


def count_top(scores_BC: Tensor, targets_B: Tensor, ks: Sequence[int] = (1, 5)) -> tuple[int, ...]:
    """Count, for each k of `ks`, the samples whose target is among the k highest scores.

    Of equal scores the first class counts as higher, so that a model which scores all classes
    alike is right as often as chance is.  With fewer classes than k, all samples count.
    """
    best_BC = scores_BC.argsort(dim=1, descending=True, stable=True)
    is_hit_BC = best_BC == targets_B[:, None]
    return tuple(int(is_hit_BC[:, :k].sum()) for k in ks)
