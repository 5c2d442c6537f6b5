"""Work and in-flight micro-batches of each stage, read off a schedule.

Read off the programs that will run, recompute and offload put in: a stage whose backward follows
at once recomputes nothing, one near the start keeps more than one near the end, and one whose
backward is divided keeps what waits for the second part.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, repeat
from typing import NamedTuple

import numpy as np

from penstock.costs.records import LayerSeconds
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
    """The mean work of a stage for a micro-batch, and the micro-batches that it keeps.

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
        """The most micro-batches in flight."""
        return max(map(sum, self.held), default=0)

    def seconds(
        self,
        of_layers: Sequence[LayerSeconds],
        policy: RecomputePolicy,
        run: tuple[int, int] | None = None,
    ) -> tuple[float, ...]:
        """Return what each layer would take the stage for a micro-batch, if it were there; only
        those of a `run`, if one is given.

        `policy` is what is recomputed on the stage: all of it, or some layers.
        """
        some = policy.layers if isinstance(policy, RecomputeLayers) else None
        start, end = run or (0, len(of_layers))
        return tuple(
            layer.forward_s
            + (self.recomputes if some is None or n in some else 0) * layer.recompute_s
            + self.wholes * layer.backward_s
            + self.halves * (layer.input_s + layer.weight_s)
            for n, layer in enumerate(of_layers[start:end], start)
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
    twice: Collection[int] = (),
    away: Collection[int] = (),
    by_layers: Collection[int] = (),
) -> tuple[StageWork, ...]:
    """Return the work of each stage where the stages `twice` recompute, those `by_layers` some
    layers only, and those `away` move what they keep.

    Raises:
        ConfigError: the family makes no schedule of such a size.
    """
    schedule = _with(steady(family, num_stages, num_microbatches), twice, away, by_layers)
    places, every = schedule.ranks, schedule.num_microbatches
    programs = [schedule.programs[places[stage]] for stage in range(num_stages)]
    own = [tuple(x for x in program if x.stage == n) for n, program in enumerate(programs)]
    return tuple(_work(program, num_stages, every) for program in own)


@lru_cache(maxsize=256)
def held_by_rank(
    family: Family, size: tuple[int, int], stages: tuple[int, ...], policy: "Kinds"
) -> tuple[tuple[Held, ...], ...]:
    """Return what the stages of a rank hold together at the times at which they keep most: at each
    of them, what each of `stages` does.  `size` are the stages and micro-batches of the schedule.
    """
    schedule = steady(family, *size)
    only = Schedule((schedule.programs[schedule.ranks[stages[0]]],))
    return _most_held(_with(only, *policy).programs[0], size[0], stages)


class Kinds(NamedTuple):
    """The stages that recompute, those that move away what they keep, and those of the first that
    recompute some layers only.
    """

    twice: frozenset[int]
    away: frozenset[int]
    by_layers: frozenset[int]


def kinds_of(recompute: Sequence[RecomputePolicy], away: Iterable[int]) -> Kinds:
    """Return what the stages of these policies do, of which those `away` move what they keep."""
    twice = (stage for stage, x in enumerate(recompute) if x is not Recompute.NEVER)
    some = (stage for stage, x in enumerate(recompute) if isinstance(x, RecomputeLayers))
    return Kinds(frozenset(twice), frozenset(away), frozenset(some))


def _with(
    schedule: Schedule,
    twice: Collection[int],
    away: Collection[int],
    by_layers: Collection[int],
) -> Schedule:
    schedule = add_recompute(schedule, twice, by_layers) if twice else schedule
    return add_offload(schedule, away) if away else schedule


class OnWay(NamedTuple):
    """The most activations and gradients that are on their way to a stage at one time."""

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
        held=tuple(held for (held,) in _most_held(own, num_stages, [own[0].stage])) if own else (),
    )


def _most_held(
    own: Program, num_stages: int, stages: Sequence[int]
) -> tuple[tuple[Held, ...], ...]:
    """Count what stages keep after each instruction, as bytes where a thing of one kind has one;
    only times at which no other time has as much of everything.
    """
    one = len(own) + 1  # graphs, inputs and weights of a stage are digits, and fewer than this
    kept = set(zip(*(_kept(own, num_stages, stage, one) for stage in stages), strict=True))
    times: Iterable[tuple[Held, ...]] = {
        tuple(Held(n % one, n // one % one, n // one**2, moved) for n, moved in time)
        for time in kept
    }
    most: list[tuple[Held, ...]] = []
    for time in sorted(times, reverse=True):  # what has more of the first comes before
        if not any(_is_within(time, other) for other in most):
            most.append(time)
    return tuple(reversed(most))


def _kept(own: Program, num_stages: int, stage: int, one: int) -> Iterator[tuple[int, int]]:
    """Yield what a stage keeps after each instruction of its rank, in digits, and what is away."""

    def count(graph: int, inputs: int, weights: int, stays: int = 0) -> Iterator[int]:
        kept = [Kept(0, 0, 0)] * num_stages
        kept[stage] = Kept(graph, inputs, weights, stays)
        return live_bytes(own, kept)

    away: Iterable[int] = repeat(0, len(own))
    if any(isinstance(x, ir.Offload) and x.stage == stage for x in own):
        pairs = zip(count(1, 1, 0, 1), count(1, 1, 0), strict=True)
        away = (wherever - left for wherever, left in pairs)
    return zip(count(1, one, one * one), away, strict=True)


def _is_within(one: tuple[Held, ...], other: tuple[Held, ...]) -> bool:
    """Tell whether nothing is kept at one time that is not at the other, and something less."""
    pairs = zip(chain(*one), chain(*other), strict=True)
    return one != other and all(a <= b for a, b in pairs)
