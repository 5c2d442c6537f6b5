"""Partition, placement and schedule chosen together: ahead of named schedules, and it fits."""

from operator import le
from random import Random

import pytest

from penstock import plan
from penstock.automatic.plan_model import simulate
from penstock.costs.profile import Profile
from penstock.errors import ConfigError
from penstock.planner.candidates import Constraints, Size
from penstock.planner.plan import Plan
from penstock.planner.rank import find_plans
from penstock.planner.search import Evaluator
from penstock.planner.together import Tuner
from penstock.schedules.critical_path import critical_path
from penstock.schedules.names import SYNCHRONOUS_FAMILIES, by_default
from tests.profiles import chain, cluster

NAMED = tuple(
    name for name in (by_default(f).name for f in SYNCHRONOUS_FAMILIES) if name != "critical_path"
)
HEAVY_ENDS = (4.0, *(1.0,) * 12, 8.0)
"""An embedding as heavy as four blocks, twelve blocks, and a head as heavy as eight."""


def best_of(profile: Profile, num_ranks: int, m: int, *schedules: str) -> Plan:
    asked = Constraints(
        batch_size=m, num_ranks=num_ranks, num_microbatches=m, schedules=schedules or None
    )
    return plan(profile, cluster(num_ranks), m, constraints=asked)


def test_with_a_heavy_embedding_and_head_it_is_ahead_of_every_named_schedule() -> None:
    profile, m = chain(HEAVY_ENDS), 4
    chosen = best_of(profile, 2, m)
    steps_s = {}
    for name in NAMED:
        made = best_of(profile, 2, m, name)
        steps_s[name] = simulate(profile, cluster(2), made).step_s
    own_s = simulate(profile, cluster(2), chosen).step_s
    assert chosen.schedule.name == "critical_path"
    assert own_s < min(steps_s.values()) / 1.05
    assert own_s >= m * 3 * sum(HEAVY_ENDS) / 2
    assert Plan.from_json(chosen.to_json()) == chosen
    assert chosen == best_of(profile, 2, m)


def test_a_model_of_equal_layers_is_not_tuned() -> None:
    asked = Constraints(batch_size=8, num_ranks=4)
    every = find_plans([chain([1.0] * 8)], cluster(4), asked)
    assert every.best[0].plan.schedule.name != "critical_path"


@pytest.mark.parametrize("seed", range(4))
def test_what_is_tuned_is_faster_and_fits_and_its_bound_is_one(seed: int) -> None:
    random = Random(seed)
    forwards_s = [random.choice((1.0, 1.0, 2.0, 6.0)) for _ in range(8)]
    here = cluster(3, memory_bytes=random.choice((10**9, 140_000)))
    asked = Constraints(batch_size=6, num_ranks=3, num_microbatches=6, schedules=NAMED)
    profile = chain(forwards_s, inner_bytes=4000)
    try:
        start = find_plans([profile], here, asked).best[0]
    except ConfigError:
        pytest.skip("nothing fits")
    evaluator = Evaluator(profile, here, asked)
    tuner = Tuner(evaluator, Size(3, 1, 6), 2, 40)
    found = tuner.run(start.predicted)
    assert 0 <= tuner.left < 40
    if found is not None:
        _, better = found
        timeline = simulate(profile, here, better.plan)
        assert better.quick_step_s < start.step_s
        limits = evaluator.limits_of(Size(3, 1, 6))
        assert all(map(le, timeline.peak_bytes_of_ranks(), limits))


def test_only_what_was_asked_for_is_tuned() -> None:
    profile = chain(HEAVY_ENDS)
    assert best_of(profile, 2, 4, "one_f_one_b").schedule.name == "one_f_one_b"
    alone = best_of(profile, 2, 4, "critical_path")
    assert alone.schedule.name == critical_path().name
