"""Sum a stage's gradients of weights that others have, so that each is sent once in a step."""

from collections.abc import Collection, Sequence

from torch import Tensor

from .run import Run, StagePair


def hold_back(
    run: Run,
    edge: StagePair,
    microbatch: int,
    found: Sequence[Tensor | None],
    lasting: Collection[int],
) -> tuple[Tensor | None, ...]:
    """Return the gradients to send along an edge (stage, peer) for a micro-batch.

    Those of lasting values are summed, and leave with the last micro-batch.  Micro-batches come in
    order, so that the sums are the same in every run.
    """
    sums, sent = run.tied_sums[edge], list(found)
    for place in lasting:
        gradient, sent[place] = found[place], None
        if gradient is not None:
            sums[place] = sums[place] + gradient if place in sums else gradient
        if microbatch == len(run.inputs) - 1:
            sent[place] = sums.pop(place, None)
    return tuple(sent)
