"""Several mini-batches that run as one, while the weights are updated."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor

from penstock.errors import BatchError, StateError

from .microbatches import Batch
from .stage_optimizers import StageOptimizer


@dataclass(frozen=True, slots=True)
class Window:
    """What updates the weights within a run.

    Each update is made of the gradients of `every` micro-batches, by the stage's optimizer.
    `uses` counts for each stage the micro-batches that see each version of its weights.
    """

    every: int
    optimizers: Mapping[int, StageOptimizer]
    uses: Mapping[int, Counter[int]]

    def moving(self, stage: int) -> tuple[Sequence[Tensor], Collection[Tensor]]:
        """Return the parameters that a stage moves, and those that others in this process have.

        A frozen one has no gradient to be moved by, and so one version.
        """
        others = (o.parameters for at, o in self.optimizers.items() if at != stage)
        own = self.optimizers[stage].parameters
        moving = [p for p in own if p.requires_grad or p.grad is not None]
        return moving, frozenset(chain.from_iterable(others))


def joined(batches: Sequence[Batch], *, apart: bool) -> Batch:
    """Put mini-batches one behind the other; with `apart`, each micro-batch weighs as a mini-batch
    does.

    Raises:
        BatchError: they have not as many micro-batches, or one that has to have a weight has none.
    """
    counts = [len(batch.sizes) for batch in batches]
    if len(set(counts)) > 1:
        raise BatchError(
            f"the batches given to train_steps have {counts} micro-batches (a batch of fewer "
            "samples than micro-batches has one for each), and within one call all have as many; "
            "give the small ones to a call of their own"
        )
    weights = list(chain.from_iterable(batch.weights for batch in batches))
    if apart:
        if 0 in weights:
            raise BatchError(
                "the reduction function gave a micro-batch the weight 0, and with this schedule "
                "each one moves the weights by a mean of its own (is there a real token in it?)"
            )
        weights = [1.0] * len(weights)
    return replace(
        batches[0],
        sizes=list(chain.from_iterable(batch.sizes for batch in batches)),
        inputs=list(chain.from_iterable(batch.inputs for batch in batches)),
        targets=list(chain.from_iterable(batch.targets for batch in batches)),
        weights=weights,
    )


def changed_in_forward(stage: int) -> StateError:
    """Make the error of a layer that writes to its weights while it runs."""
    return StateError(
        f"a layer of stage {stage} changed a weight in its own forward, as "
        "nn.Embedding(max_norm=...) does. With this schedule forwards see weights that updates "
        "have left behind, where the change would be lost. Load a checkpoint; leave that out, or "
        "use a synchronous schedule"
    )
