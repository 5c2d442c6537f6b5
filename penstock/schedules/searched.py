"""Searched: the shortest of many schedules for measured costs, under a limit of each rank."""

from functools import lru_cache, partial

from penstock.errors import ConfigError

from .costs import Costs
from .critical_path import filled
from .family import Family
from .ir import Schedule
from .laws import SYNCHRONOUS, AtMostBytes, Law
from .one_f_one_b import one_f_one_b
from .problem import (
    answer_of,
    check_is_limit,
    check_limits,
    fits,
    joined,
    length,
    problem_of,
    schedule_of,
)


def searched(
    costs: Costs,
    memory: AtMostBytes | None = None,
    like: Family = one_f_one_b,
    recompute: tuple[int, ...] = (),
) -> Family:
    """Choose the schedule that ends first, with backwards in one part or two, for these costs.

        pipe.train_step(inputs, targets)  # with trace=True
        costs = measured_costs(pipe.last_timeline)
        Pipeline(layers, num_stages=3, schedule=schedules.searched(costs))

    p = 3, m = 4, a backward of two forwards, either part of it one:

    rank 0 | 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    rank 1 | 1F0 1F1 1F2 1I0 1F3 1I1 1W0 1I2 1W1 1I3 1W2 1W3
    rank 2 | 2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3

    Stages lie on ranks as in the family `like`, and form a chain.  No rank keeps more than
    `memory` allows, which is proved before a step.  The stages in `recompute` drop their graphs.

    It is the shortest of two kinds of schedules that keep to `memory`.  The first are those of all
    families with stages on the same ranks.  The second are list schedules by critical paths, with
    these recomputes.  The same arguments give the same schedule in every process.

    Making it raises ConfigError if costs are of another number of stages, limits of another
    number of ranks, or a limit is too low for even one micro-batch.

    Raises:
        ConfigError: an argument is of another kind.
    """
    _check_arguments(costs, memory, like, recompute)
    arguments = (
        *(("costs", costs), ("memory", memory)),
        *(("like", like), ("recompute", recompute)),
    )
    laws: tuple[Law, ...] = SYNCHRONOUS if memory is None else (*SYNCHRONOUS, memory)
    return Family("searched", _schedule, like.stages_per_rank, arguments, like.deal, laws)


def _check_arguments(costs: object, memory: object, like: object, recompute: object) -> None:
    if costs is None:
        raise ConfigError(
            "searched(costs=None): it is made for costs; give Costs(forward_s=..., "
            "backward_s=..., recompute_s=...), or measured_costs(pipe.last_timeline) of a step "
            "with trace=True"
        )
    check_is_limit(memory)
    if not isinstance(like, Family):
        raise ConfigError(
            f"like={like!r:.80} is no schedule family, on whose ranks stages could lie: write "
            f"like={getattr(like, '__name__', 'zb_v')}()"
        )
    if not isinstance(recompute, tuple) or not all(type(stage) is int for stage in recompute):
        raise ConfigError(
            f"recompute={recompute!r} is no tuple of stages: give the numbers of those that drop "
            "their graphs, such as (0, 1), or () for none"
        )


@lru_cache(maxsize=32)
def _schedule(
    num_stages: int,
    num_microbatches: int,
    costs: Costs,
    memory: AtMostBytes | None,
    like: Family,
    recompute: tuple[int, ...],
) -> Schedule:
    from .names import families_for  # the names know the families, not the other way round

    _check_stages(num_stages, costs, recompute)
    ranks = like.ranks(num_stages)
    problem = problem_of(costs, memory, ranks, num_microbatches, recompute)
    check_limits(problem)
    # 1. the named families that have these ranks and keep to the memory
    answers = [
        answer
        for family in families_for(costs, like.stages_per_rank)
        if family.ranks(num_stages) == ranks
        and (answer := answer_of(problem, family(num_stages, num_microbatches)))
        and all(fits(problem, *program) for program in enumerate(answer))
    ]
    # 2. list schedules, which keep to it by construction
    answers += filled(problem)
    return schedule_of(problem, joined(problem, min(answers, key=partial(length, problem))))


def _check_stages(num_stages: int, costs: Costs, recompute: tuple[int, ...]) -> None:
    """Refuse costs and recomputes of stages that there are not."""
    edges = costs.transfer_s if isinstance(costs.transfer_s, tuple) else ()
    for name, stages in (
        ("costs: transfer_s", [stage for edge, _ in edges for stage in edge]),
        ("recompute", recompute),
    ):
        for stage in stages:
            if not 0 <= stage < num_stages:
                raise ConfigError(
                    f"{name} names stage {stage}, and the {num_stages} stages are 0 to "
                    f"{num_stages - 1}; leave it out, or choose costs of as many stages"
                )
