"""What a schedule has each stage do with a micro-batch, and how many of them it keeps at a time.

Read off the programs that will run, recompute and offload put in: a stage whose backward follows
at once recomputes nothing, one near the start keeps more than one near the end, and one whose
backward is divided keeps what waits for the second part.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, repeat
from typing import NamedTuple

import numpy as np

from penstock.costs.profile import LayerSeconds
from penstock.schedules import ir
from penstock.schedules.family import Family
from penstock.schedules.ir import Program, Schedule
from penstock.schedules.memory import Kept, live_bytes
from penstock.schedules.passes import add_offload, add_recompute
from penstock.types import Recompute, RecomputeLayers, RecomputePolicy

from .cuts import Matrix, Window


class Tables(NamedTuple):
    """Bytes of one micro-batch on a stage of layers [start, end), as `schedules.memory.Sizes`."""

    graph: Matrix
    inputs: Matrix
    weights: Matrix
    stays: Matrix

    def within(self, window: Window) -> "Tables":
        """Return the part that is within a window."""
        return Tables(*(table[window] for table in self))


class Held(NamedTuple):
    """How many micro-batches a stage keeps something of at one time: graphs; inputs, or whatever
    else stays where a graph was dropped; parts of backwards that wait for weights; and those that
    were moved away.
    """

    graphs: int
    inputs: int
    weights: int
    away: int


@dataclass(frozen=True, slots=True)
class StageWork:
    """What a stage does for each micro-batch, on average, and what it keeps.

    Every micro-batch runs forward once, `recomputes` times again, and backward in one piece
    (`wholes`) or in two (`halves`).  `held` are the times at which it keeps most: no other time
    has as much of everything.
    """

    recomputes: float
    wholes: float
    halves: float
    held: tuple[Held, ...]

    @property
    def most_kept(self) -> int:
        """How many micro-batches it keeps something of, at the most."""
        return max(map(sum, self.held), default=0)

    def seconds(
        self, of_layers: Sequence[LayerSeconds], policy: RecomputePolicy
    ) -> tuple[float, ...]:
        """Return what each layer would take the stage for a micro-batch, if it were there.

        `policy` is what is recomputed on the stage: all of it, or some layers.
        """
        some = policy.layers if isinstance(policy, RecomputeLayers) else None
        return tuple(
            layer.forward_s
            + (self.recomputes if some is None or n in some else 0) * layer.recompute_s
            + self.wholes * layer.backward_s
            + self.halves * (layer.input_s + layer.weight_s)
            for n, layer in enumerate(of_layers)
        )

    def peak_bytes(self, tables: Tables) -> Matrix:
        """Return the most that the stage keeps, whatever layers it has."""
        most: Matrix = np.zeros_like(tables.graph)
        for held in self.held:
            terms = zip(held, tables, strict=True)
            kept = [table if n == 1 else n * table for n, table in terms if n]
            for more in kept[1:]:
                kept[0] = kept[0] + more
            np.maximum(most, kept[0] if kept else 0, out=most)
        return most


def work_of(
    family: Family,
    num_stages: int,
    num_microbatches: int,
    recompute: Sequence[RecomputePolicy],
    offload: Collection[int] = (),
) -> tuple[StageWork, ...]:
    """Return the work of each stage; `recompute` has an entry for each, `offload` names stages.

    Raises:
        ConfigError: the family makes no schedule of such a size.
    """
    schedule = steady(family, num_stages, num_microbatches)
    twice = [stage for stage, kind in enumerate(recompute) if kind is not Recompute.NEVER]
    schedule = add_recompute(schedule, twice) if twice else schedule
    schedule = add_offload(schedule, offload) if offload else schedule
    places, every = schedule.ranks, schedule.num_microbatches
    programs = [schedule.programs[places[stage]] for stage in range(num_stages)]
    own = [tuple(x for x in program if x.stage == n) for n, program in enumerate(programs)]
    return tuple(_work(program, num_stages, every) for program in own)


class OnWay(NamedTuple):
    """How many activations and gradients are on their way to a stage at one time, at the most."""

    activations: int
    gradients: int


def most_on_way(work: Sequence[StageWork], num_microbatches: int) -> list[OnWay]:
    """Return for each stage how many messages can be on their way to it, whatever the times.

    What a message belongs to is kept at the same time: of an activation by the stage that sent it,
    whose backward waits for what comes back, and of a gradient by the stage that it goes to.
    """
    kept = [min(num_microbatches, each.most_kept) for each in work]
    before = accumulate(kept, max, initial=0)
    return [OnWay(sent, own) for sent, own in zip(before, kept, strict=False)]


made = lru_cache(maxsize=16)(Family.__call__)
"""What a family makes, looked up: its work is read off it, and it is lowered and priced."""


def steady(family: Family, num_stages: int, num_microbatches: int) -> Schedule:
    """Make the schedule of a step, or without a flush of as many mini-batches as it takes until
    a stage keeps the most that it ever will.
    """
    if not family.is_asynchronous:
        return made(family, num_stages, num_microbatches, 1)
    filling = -(-num_stages // num_microbatches)
    return made(family, num_stages, num_microbatches, filling + 3)


def _work(own: Program, num_stages: int, num_microbatches: int) -> StageWork:
    """Count what the instructions of one stage do; `own` are only those."""
    done = Counter(map(type, own))

    def per_microbatch(kind: type[ir.Instruction]) -> float:
        return done[kind] / num_microbatches

    return StageWork(
        recomputes=per_microbatch(ir.Recompute),
        wholes=per_microbatch(ir.Backward),
        halves=per_microbatch(ir.BackwardInput),
        held=_most_held(own, num_stages),
    )


def _most_held(own: Program, num_stages: int) -> tuple[Held, ...]:
    """Count what is kept after each instruction, as bytes where a thing of one kind has one."""

    def count(graph: int, inputs: int, weights: int, stays: int = 0) -> Iterator[int]:
        return live_bytes(own, (Kept(graph, inputs, weights, stays),) * num_stages)

    one = len(own) + 1  # graphs, inputs and weights are digits, and fewer than this
    here = list(count(1, one, one * one))
    away: Iterable[int] = repeat(0)
    if any(isinstance(x, ir.Offload) for x in own):
        pairs = zip(count(1, 1, 0, 1), count(1, 1, 0), strict=True)
        away = (wherever - left for wherever, left in pairs)
    times = {
        Held(n % one, n // one % one, n // (one * one), moved)
        for n, moved in set(zip(here, away))  # noqa: B905 - zeros have no end
    }
    most: list[Held] = []
    for time in sorted(times, reverse=True):  # what has more of the first comes before
        if not any(_is_within(time, other) for other in most):
            most.append(time)
    return tuple(reversed(most))


def _is_within(one: Held, other: Held) -> bool:
    """Tell whether nothing is kept at one time that is not at the other, and something less."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
