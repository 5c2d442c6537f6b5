"""Every schedule, each for any number of stages: what the laws are tried on."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from penstock.schedules import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Family,
    Forward,
    Schedule,
    critical_path,
    interleaved_1f1b,
    one_f_one_b,
    searched,
    segmented,
    zb_h1,
)
from penstock.schedules.costs import Costs
from penstock.schedules.family import zigzag
from penstock.schedules.ir import Instruction, Program
from penstock.schedules.names import (
    SYNCHRONOUS_FAMILIES,
    Maker,
    argument_types,
    by_default,
    family_named,
    family_of,
)


def families(stages_per_rank: int) -> list[Family]:
    """Give every synchronous family that runs so many stages on each rank."""
    named = (
        family_named(family.name, {"stages_per_rank": stages_per_rank})
        if stages_per_rank > 1 and "stages_per_rank" in argument_types(family.name)
        else family
        for family in map(by_default, SYNCHRONOUS_FAMILIES)
    )
    return [family for family in named if family.stages_per_rank == stages_per_rank]


def for_any_number(given: Family | Maker) -> Family:
    """Give a family that takes any number of stages, as far as `given` does.

    With two or three stages on each rank, or whatever number can be, where that may be chosen; a
    family of two stages a rank is, for an odd number of stages, interleaved 1F1B.
    """
    whole = by_default(given)
    if whole.stages_per_rank == 1:
        return whole

    def fitting(num_stages: int) -> Family:
        per_rank = next((v for v in (2, 3) if num_stages % v == 0), num_stages)
        if "stages_per_rank" in argument_types(whole.name):
            return family_named(whole.name, {"stages_per_rank": per_rank})
        return whole if per_rank == 2 else interleaved_1f1b(per_rank)

    return Family(
        f"{whole.name}_for_any",
        lambda num_stages, num_microbatches: fitting(num_stages)(num_stages, num_microbatches),
        deal=lambda num_stages, _: fitting(num_stages).ranks(num_stages),
    )


def divided(num_stages: int, num_microbatches: int) -> Schedule:
    """Give 1F1B with every backward in two parts, those of weights one micro-batch later."""

    def rewritten(program: Program) -> Iterator[Instruction]:
        waiting: list[Instruction] = []
        for x in program:
            if not isinstance(x, Backward):
                yield x
                continue
            yield BackwardInput(x.stage, x.microbatch)
            yield from waiting
            waiting = [BackwardWeight(x.stage, x.microbatch)]
        yield from waiting

    whole = one_f_one_b(num_stages, num_microbatches)
    return Schedule(tuple(tuple(rewritten(program)) for program in whole.programs))


IN_TWO_PARTS = family_of(divided, num_microbatches=1)


def searched_for(num_stages: int, num_microbatches: int) -> Schedule:
    """Give what is searched for stages that are not alike."""
    return searched(unlike(num_stages))(num_stages, num_microbatches)


def listed_for(num_stages: int, num_microbatches: int) -> Schedule:
    """Give a list schedule of such stages, there and back, with the first and the last alone."""
    num_ranks = num_stages // 2 + 1
    between = zigzag(max(0, num_stages - 2), max(1, num_ranks - 2))
    ranks = (0, *(1 + rank for rank in between), num_ranks - 1)[-num_stages:]
    family = critical_path(unlike(num_stages), tuple(rank - ranks[0] for rank in ranks))
    return family(num_stages, num_microbatches)


def segmented_for(num_stages: int, num_microbatches: int) -> Schedule:
    """Give zero-bubble stages of two segments, the last of one if the number is odd."""
    sizes = (2,) * (num_stages // 2) + (1,) * (num_stages % 2)
    return segmented(sizes, zb_h1())(num_stages, num_microbatches)


def unlike(num_stages: int) -> Costs:
    """Give costs of stages of which some have much to do for weights, some little."""
    return Costs(
        forward_s=tuple(2 + stage % 2 for stage in range(num_stages)),
        backward_s=tuple(5 + 4 * (stage % 3) for stage in range(num_stages)),
        recompute_s=2,
        transfer_s=1,
        backward_input_s=3,
        backward_weight_s=tuple(1 + 5 * (stage % 3) for stage in range(num_stages)),
    )


EVERY_SCHEDULE = (
    *map(for_any_number, SYNCHRONOUS_FAMILIES),
    IN_TWO_PARTS,
    family_of(searched_for, num_microbatches=1),
    family_of(listed_for, num_microbatches=1),
    family_of(segmented_for, num_microbatches=1),
)


def some_schedules(turn: int, count: int = 5) -> tuple[Family, ...]:
    """Give a few of them; with the next turn, the next few."""
    numbers = range(turn * count, (turn + 1) * count)
    return tuple(EVERY_SCHEDULE[n % len(EVERY_SCHEDULE)] for n in numbers)


Progress = dict[tuple[int, bool], int]
"""How many forwards (False) and backwards (True) of each stage are done."""


def ready_in(done: Progress, num_stages: int, num_microbatches: int) -> list[tuple[int, bool]]:
    """List whose next forward or backward has all it needs."""

    def is_ready(stage: int, is_backward: bool) -> bool:
        number = done[stage, is_backward]
        if number == num_microbatches:
            return False
        if not is_backward:
            return stage == 0 or done[stage - 1, False] > number
        is_last = stage == num_stages - 1
        return done[stage, False] > number and (is_last or done[stage + 1, True] > number)

    return [place for place in done if is_ready(*place)]


@dataclass(frozen=True, slots=True)
class Dealt:
    """Stages on ranks as `ranks[stage]` says; each rank does what is ready, in its own order.

    Even ranks prefer the first stage and forwards; odd ones, half as fast, the last stage and
    backwards: they want what was sent later before what was sent earlier.
    """

    ranks: tuple[int, ...]

    def __call__(self, num_stages: int, num_microbatches: int) -> Schedule:
        done = {(stage, backward): 0 for stage in range(num_stages) for backward in (False, True)}
        programs: list[list[Instruction]] = [[] for _ in range(1 + max(self.ranks))]
        rounds = count()
        while ready := ready_in(done, num_stages, num_microbatches):
            idle = next(rounds) % 2
            for rank, program in enumerate(programs):
                own = [place for place in ready if self.ranks[place[0]] == rank]
                if own and not (rank % 2 and idle):
                    stage, backward = max(own) if rank % 2 else min(own)
                    kind = Backward if backward else Forward
                    program.append(kind(stage, done[stage, backward]))
                    done[stage, backward] += 1
        return Schedule(tuple(map(tuple, programs)))
