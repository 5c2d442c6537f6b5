"""1F1B over several mini-batches without a flush in between: what asynchronous families share."""

from collections.abc import Callable, Iterator

from .ir import Backward, Forward, Instruction, Schedule, UpdateWeights

Version = Callable[[int, int], int]
"""(stage, micro-batch) -> how many updates of the stage its forward is to see."""


def without_flush(
    num_stages: int, num_microbatches: int, microbatches_per_update: int, version: Version
) -> Schedule:
    """Begin stage s with p - s - 1 forwards, alternate, update after each mini-batch's backwards.

    A forward whose version of the weights is not there yet lets backwards go first.
    """

    def program(stage: int) -> Iterator[Instruction]:
        warmup, forwards, updates = num_stages - stage - 1, 0, 0
        for i in range(num_microbatches):
            while forwards < num_microbatches and forwards <= i + warmup:
                if version(stage, forwards) > updates:
                    break
                yield Forward(stage, forwards, version=version(stage, forwards))
                forwards += 1
            yield Backward(stage, i)
            if (i + 1) % microbatches_per_update == 0:
                yield UpdateWeights(stage)
                updates += 1

    return Schedule(tuple(tuple(program(stage)) for stage in range(num_stages)))
