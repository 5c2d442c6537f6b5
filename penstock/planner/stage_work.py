"""Count the work and the in-flight micro-batches of each stage in a schedule.

The programs are those that will run, with recompute and offload.  So a stage whose backward
follows its forward at once recomputes nothing, early stages keep more than late ones, and a
divided backward keeps what its second part needs.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, repeat
from operator import le
from typing import NamedTuple

import numpy as np

from penstock.costs.records import LayerSeconds
from penstock.schedules import ir
from penstock.schedules.family import Family
from penstock.schedules.ir import Program, Schedule
from penstock.schedules.lower import Lowering, lower_unproved
from penstock.schedules.memory import Kept, live_bytes
from penstock.schedules.passes import add_offload, add_recompute
from penstock.simulator.engine import Compiled, compiled
from penstock.types import Recompute, RecomputeLayers, RecomputePolicy

from .cuts import Window
from .stage_program import Matrix


class Tables(NamedTuple):
    """Bytes of one micro-batch on a stage of layers [start, end), as `schedules.memory.Sizes`."""

    graph: Matrix
    inputs: Matrix
    weights: Matrix
    stays: Matrix

    def within(self, window: Window) -> "Tables":
        return Tables(*(table[window] for table in self))


class Held(NamedTuple):
    """Micro-batches that a stage keeps at one time, by what it keeps of them.

    `graphs`: the whole graph; `inputs`: the inputs of a dropped graph; `weights`: operands of the
    second part of a backward; `away`: offloaded.
    """

    graphs: int
    inputs: int
    weights: int
    away: int


@dataclass(frozen=True, slots=True)
class StageWork:
    """The mean work of a stage for a micro-batch, and the micro-batches that it keeps.

    Each micro-batch has one forward, `recomputes` recomputes, and a backward in one part
    (`wholes`) or two (`halves`).  `held` are the peaks: no other time keeps as much of everything.
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
        """Return the seconds of each layer for a micro-batch, if it were on this stage.

        `policy` is the stage's recompute policy.  A `run` limits the result to its layers.
        """
        recomputed = policy.layers if isinstance(policy, RecomputeLayers) else None
        start, end = run or (0, len(of_layers))
        return tuple(
            layer.forward_s
            + (self.recomputes if recomputed is None or n in recomputed else 0) * layer.recompute_s
            + self.wholes * layer.backward_s
            + self.halves * (layer.input_s + layer.weight_s)
            for n, layer in enumerate(of_layers[start:end], start)
        )

    def peak_bytes(self, tables: Tables) -> Matrix:
        """Return the peak bytes of the stage for each run of layers."""
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
    """Return the work of each stage; `twice` recompute (`by_layers` in part), `away` offload."""
    schedule = _with(steady(family, num_stages, num_microbatches), twice, away, by_layers)
    places, count = schedule.ranks, schedule.num_microbatches
    programs = [schedule.programs[places[stage]] for stage in range(num_stages)]
    of_stages = [tuple(x for x in program if x.stage == n) for n, program in enumerate(programs)]
    return tuple(_work(program, num_stages, count) for program in of_stages)


@lru_cache(maxsize=256)
def held_by_rank(
    family: Family, size: tuple[int, int], stages: tuple[int, ...], policy: "Kinds"
) -> tuple[tuple[Held, ...], ...]:
    """Return what each of a rank's `stages` keeps, at each time at which the rank may keep most.

    `size` are the numbers of stages and micro-batches of the schedule.
    """
    schedule = steady(family, *size)
    only = Schedule((schedule.programs[schedule.ranks[stages[0]]],))
    return _most_held(_with(only, *policy).programs[0], size[0], stages)


class Kinds(NamedTuple):
    """The stages that recompute, that offload, and that recompute some layers only."""

    twice: frozenset[int]
    away: frozenset[int]
    by_layers: frozenset[int]


def kinds_of(recompute: Sequence[RecomputePolicy], away: Iterable[int]) -> Kinds:
    """Return the kinds of stages with these recompute policies; those `away` offload."""
    twice = (stage for stage, x in enumerate(recompute) if x is not Recompute.NEVER)
    whole = (Recompute.NEVER, Recompute.STAGE)
    by_layers = (stage for stage, x in enumerate(recompute) if x not in whole)
    return Kinds(frozenset(twice), frozenset(away), frozenset(by_layers))


def _with(
    schedule: Schedule,
    twice: Collection[int],
    away: Collection[int],
    by_layers: Collection[int],
) -> Schedule:
    schedule = add_recompute(schedule, twice, by_layers) if twice else schedule
    return add_offload(schedule, away) if away else schedule


class OnWay(NamedTuple):
    """The most activations and gradients in flight to a stage at one time."""

    activations: int
    gradients: int


def most_on_way(work: Sequence[StageWork], num_microbatches: int) -> list[OnWay]:
    """Return the most messages in flight to each stage, for any seconds of instructions.

    The micro-batch of a message is kept meanwhile: of an activation by its sender, whose backward
    waits for the gradient, and of a gradient by its receiver.
    """
    kept = [min(num_microbatches, stage.most_kept) for stage in work]
    kept_before = accumulate(kept, max, initial=0)
    return [OnWay(sent, here) for sent, here in zip(kept_before, kept, strict=False)]


made = lru_cache(maxsize=16)(Family.__call__)
"""The cached schedule of a family, which is counted here, and lowered and priced elsewhere."""


@lru_cache(maxsize=256)
def program_of(how: Lowering, num_microbatches: int) -> Compiled:
    """Return a lowered schedule as the simulator runs it."""
    return compiled(lower_unproved(how, num_microbatches, make=made))


def steady(family: Family, num_stages: int, num_microbatches: int) -> Schedule:
    """Make the schedule of a step, or of the mini-batches after which no stage keeps more."""
    if not family.is_asynchronous:
        return made(family, num_stages, num_microbatches, 1)
    filling = -(-num_stages // num_microbatches)
    return made(family, num_stages, num_microbatches, filling + 3)


def _work(program: Program, num_stages: int, num_microbatches: int) -> StageWork:
    """Count the work of one stage; `program` has only its instructions."""
    done = Counter(map(type, program))

    def per_microbatch(kind: type[ir.Instruction]) -> float:
        return done[kind] / num_microbatches

    return StageWork(
        recomputes=per_microbatch(ir.Recompute),
        wholes=per_microbatch(ir.Backward),
        halves=per_microbatch(ir.BackwardInput),
        held=tuple(held for (held,) in _most_held(program, num_stages, [program[0].stage]))
        if program
        else (),
    )


def _most_held(
    program: Program, num_stages: int, stages: Sequence[int]
) -> tuple[tuple[Held, ...], ...]:
    """Return what stages keep after each instruction, without times at which they keep less.

    The formula of bytes is used to count: a graph has 1 byte, inputs `one`, weights `one` squared.
    """
    # so the three counts are digits of a sum in base `one`: there are fewer of each than that
    one = len(program) + 1
    kept = set(zip(*(_kept(program, num_stages, stage, one) for stage in stages), strict=True))
    times: Iterable[tuple[Held, ...]] = {
        tuple(Held(n % one, n // one % one, n // one**2, moved) for n, moved in time)
        for time in kept
    }
    most: list[tuple[Held, ...]] = []
    for time in sorted(times, reverse=True):  # a time that is within another comes after it
        numbers = [*chain(*time)]
        within = (all(map(le, numbers, chain(*other))) for other in most)
        if not any(within):
            most.append(time)
    return tuple(reversed(most))


def _kept(program: Program, num_stages: int, stage: int, one: int) -> Iterator[tuple[int, int]]:
    """Yield the digits of what a stage keeps after each instruction, and its offloaded number."""

    def count(graph: int, inputs: int, weights: int, stays: int = 0) -> Iterator[int]:
        kept = [Kept(0, 0, 0)] * num_stages
        kept[stage] = Kept(graph, inputs, weights, stays)
        return live_bytes(program, kept)

    # with bytes that stay, an Offload moves nothing away: the difference is what is away
    away: Iterable[int] = repeat(0, len(program))
    if any(isinstance(x, ir.Offload) and x.stage == stage for x in program):
        pairs = zip(count(1, 1, 0, 1), count(1, 1, 0), strict=True)
        away = (without_offload - left for without_offload, left in pairs)
    return zip(count(1, one, one * one), away, strict=True)
