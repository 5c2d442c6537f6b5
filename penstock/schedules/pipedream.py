"""PipeDream: no flush, an update after every micro-batch, stashed weights (Narayanan et al. 2019).
A mini-batch of the paper is a micro-batch here: each makes an update.

PipeDream-2BW: no flush, gradients one mini-batch old, two versions (Narayanan et al. 2021).
"""

from collections.abc import Iterator

from .family import Family, Updates
from .ir import Backward, Forward, Instruction, Schedule, UpdateWeights
from .laws import ASYNCHRONOUS
from .laws.updates import Sees, Version


def _without_flush(
    num_stages: int, num_microbatches: int, microbatches_per_update: int, version: Version
) -> Schedule:
    """Begin stage s with p - s - 1 forwards, alternate, update after each mini-batch's backwards.

    A forward whose version of the weights is not there yet lets backwards go first.
    """

    def program(stage: int) -> Iterator[Instruction]:
        warmup, forwards, updates = num_stages - stage - 1, 0, 0
        for i in range(num_microbatches):
            # up to `warmup` forwards ahead, as far as their versions are there
            while forwards < num_microbatches and forwards <= i + warmup:
                seen = version(stage, forwards, microbatches_per_update, num_stages)
                if seen > updates:
                    break
                yield Forward(stage, forwards, version=seen)
                forwards += 1
            yield Backward(stage, i)
            if (i + 1) % microbatches_per_update == 0:
                yield UpdateWeights(stage)
                updates += 1

    return Schedule.of(program(stage) for stage in range(num_stages))


def pipedream(vertical_sync: bool = False) -> Family:
    """Return the family; with `vertical_sync` a micro-batch sees one version on all stages, that
    which is the newest on stage 0 when it comes there.

    Without, it sees the newest one of each stage.  Stage s keeps as many as p - s versions;
    with vertical sync every stage keeps p.
    """
    return Family(
        pipedream.__name__,
        _schedule,
        arguments=(("vertical_sync", vertical_sync),),
        laws=(*ASYNCHRONOUS, Sees(_synchronised if vertical_sync else _newest)),
        updates=Updates.EACH_MICROBATCH,
    )


def _schedule(
    num_stages: int, num_microbatches: int, num_minibatches: int, vertical_sync: bool
) -> Schedule:
    """Alternate forwards with backwards over all mini-batches; update after each backward.

    p = 3, 4 micro-batches in all:

    stage 0 | F0 F1 F2 B0 U F3@1 B1 U B2 U B3 U
    stage 1 | F0 F1 B0 U F2@1 B1 U F3@2 B2 U B3 U
    stage 2 | F0 B0 U F1@1 B1 U F2@2 B2 U F3@3 B3 U

    and with vertical sync:

    stage 2 | F0 B0 U F1 B1 U F2 B2 U F3@1 B3 U
    """
    version = _synchronised if vertical_sync else _newest
    return _without_flush(num_stages, num_microbatches * num_minibatches, 1, version)


def _newest(stage: int, microbatch: int, per_update: int, num_stages: int) -> int:
    return max(microbatch - (num_stages - stage - 1), 0)


def _synchronised(stage: int, microbatch: int, per_update: int, num_stages: int) -> int:
    return _newest(0, microbatch, per_update, num_stages)


def _schedule_2bw(num_stages: int, num_microbatches: int, num_minibatches: int) -> Schedule:
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
    return _without_flush(num_stages, number, num_microbatches, _version_2bw)


def _version_2bw(stage: int, microbatch: int, per_update: int, num_stages: int) -> int:
    return max(microbatch // per_update - 1, 0)


pipedream_2bw = Family(
    "pipedream_2bw",
    _schedule_2bw,
    laws=(*ASYNCHRONOUS, Sees(_version_2bw)),
    updates=Updates.EACH_MINIBATCH,
)
"""PipeDream-2BW: no flush, gradients one mini-batch old, two versions of the weights."""
