"""Sum a stage's gradients of weights that others have, so that each is sent once in a step."""

from collections.abc import Collection, Sequence

from torch import Tensor


def hold_back(
    sums: dict[int, Tensor],
    found: Sequence[Tensor | None],
    lasting: Collection[int],
    *,
    is_last: bool,
) -> tuple[Tensor | None, ...]:
    """Return what to send of the gradients that a micro-batch found for one peer's values.

    Those of lasting values are added to `sums`, by place, and leave with the last micro-batch.
    Micro-batches come in order, so that the sums are the same in every run.
    """
    sent = list(found)
    for place in lasting:
        gradient, sent[place] = found[place], None
        if gradient is not None:
            sums[place] = sums[place] + gradient if place in sums else gradient
        if is_last:
            sent[place] = sums.pop(place, None)
    return tuple(sent)
