"""Schedule families: values that say who runs what, and that are written and read by name."""

import copy
import json
import pickle
from functools import partial
from pathlib import Path

import pytest

from penstock import schedules
from penstock.errors import ConfigError
from penstock.planner.plan import Plan
from penstock.schedules import (
    AtMostBytes,
    Costs,
    Family,
    Schedule,
    Sizes,
    breadth_first,
    critical_path,
    from_csv,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    searched,
    segmented,
    wave,
    zb_h1,
    zb_v,
)
from penstock.schedules.costs import UNIT_COSTS
from penstock.schedules.names import (
    ASYNCHRONOUS_SCHEDULES,
    SYNCHRONOUS_FAMILIES,
    by_default,
    family_named,
    family_of,
)
from penstock.types import Recompute
from tests.every_schedule import EVERY_SCHEDULE, Dealt
from tests.planner.plans import plan

FAMILIES = (
    *map(by_default, SYNCHRONOUS_FAMILIES),
    *(interleaved_1f1b(3), breadth_first(3), wave(3)),
    *ASYNCHRONOUS_SCHEDULES,
)


@pytest.mark.parametrize("family", (*FAMILIES, *EVERY_SCHEDULE), ids=str)
def test_a_family_predicts_the_ranks_that_its_schedules_have(family: Family) -> None:
    for num_ranks in range(1, 5):
        num_stages = num_ranks * family.stages_per_rank
        for m in (1, 2, 5):
            assert family(num_stages, m).ranks == family.ranks(num_stages)


def test_the_ranks_of_a_family_are_known_without_a_schedule() -> None:
    def build(num_stages: int, num_microbatches: int) -> Schedule:
        raise AssertionError("a schedule was made")

    assert Family("mine", build, stages_per_rank=2).ranks(6) == (0, 1, 2, 0, 1, 2)
    backward = Family("mine", build, deal=lambda num_stages, _: (*range(num_stages),)[::-1])
    assert backward.ranks(3) == (2, 1, 0)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_family_is_a_value(family: Family) -> None:
    assert pickle.loads(pickle.dumps(family)) == copy.deepcopy(family) == family
    written = json.dumps({"name": family.name, "arguments": dict(family.arguments)})
    assert family_named(**json.loads(written)) == family
    assert eval(str(family), vars(schedules)) == family


def test_a_function_of_the_users_own_is_a_family_named_as_it_is() -> None:
    def mine(num_stages: int, num_microbatches: int) -> Schedule:
        return Dealt((0, 0, 1))(num_stages, num_microbatches)

    assert family_of(one_f_one_b, 4) is family_of("1F1B", 4) is one_f_one_b
    assert family_of(zb_h1, 4) == family_of("zb-h1", 4) == zb_h1()
    assert str(family_of(mine, 4)) == "mine"
    assert family_of(mine, 4).ranks(3) == (0, 0, 1)
    assert family_of(mine, 4)(3, 2) == mine(3, 2)
    assert str(family_of(Dealt((0, 1)), 4)) == "Dealt(ranks=(0, 1))"
    assert family_of(partial(mine), 4).ranks(3) == (0, 0, 1)


def test_a_schedule_is_a_family_of_its_own_size() -> None:
    schedule = one_f_one_b(3, 4)
    assert family_of(schedule, 4)(3, 4) == schedule
    assert family_of(schedule, 4)(3, 2) == one_f_one_b(3, 2)  # as a smaller last batch needs
    with pytest.raises(ConfigError, match="has 3 stages, and 2 were asked for"):
        family_of(schedule, 4).ranks(2)


SMALL = Family("small", lambda k, m: one_f_one_b(k, m - 1))
FEWER = family_of(lambda k, m: one_f_one_b(k - 1, m), 3)


@pytest.mark.parametrize(
    "make, arguments, message",
    (
        (
            family_named,
            ("gpip", {}),
            "there is no schedule 'gpip'; choose one of gpipe, one_f",
        ),
        (family_named, ("gpipe", {"stages_per_rank": 2}), "gpipe takes the arguments .*, and was"),
        (
            family_named,
            ("interleaved_1f1b", {}),
            "takes the arguments .'stages_per_rank'., and",
        ),
        (family_named, ("wave", {"stages_per_rank": 0}), "must be a whole number of at least 1"),
        *(
            (family_of, (given, 4), r"is no schedule; give a name, .*from_csv\(path\) reads")
            for given in (Path("x.csv"), searched, from_csv, segmented, 5)
        ),
        (zb_h1, (5,), r"zb_h1\(costs=5\): give Costs"),
        (searched, (None,), r"searched\(costs=None\): it is made for costs"),
        (searched, ("x",), r"searched\(costs='x'\): give Costs"),
        (searched, (UNIT_COSTS, None, zb_v), r"no schedule family.* like=zb_v\(\)"),
        (searched, (UNIT_COSTS, None, one_f_one_b, [0]), r"recompute=\[0\] is no tuple of"),
        (searched, (UNIT_COSTS, None, one_f_one_b, Recompute.STAGE), "is no tuple of stages"),
        (SMALL, (2, 3), "asked for 2 stages and 3 micro-batches, and gave 2"),
        (FEWER.ranks, (2,), "asked for 2 stages and 3 micro-batches, and gave 1"),
    ),
)
def test_what_is_no_family_or_makes_none_is_refused(make, arguments, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make(*arguments)


@pytest.mark.parametrize("family", (*FAMILIES, *EVERY_SCHEDULE), ids=str)
def test_sizes_are_whole_numbers_of_at_least_1(family: Family) -> None:
    for count in (0, -2, 2.0):
        with pytest.raises(ConfigError, match=f"^num_stages={count}; it must be a whole number"):
            family(count, 4)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"^num_microbatches={count}; it must be a whole"):
            family(family.stages_per_rank, count)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "family",
    (
        critical_path(),
        critical_path(Costs(forward_s=(1, 2.5, 1), backward_s=3), (0, 1, 0)),
        critical_path(None, (0, 1, 0), AtMostBytes(Sizes(kept_bytes=1), (3, 2))),
        segmented((1, 2), gpipe),
        segmented((1, 2), zb_h1(Costs(forward_s=(1, 2), backward_s=3))),
    ),
    ids=str,
)
def test_a_plan_keeps_it_in_its_file(family: Family) -> None:
    made = plan(1, 1, 1, schedule=family)
    again = Plan.from_json(made.to_json())
    assert again == made
    assert again.schedule(3, 4) == family(3, 4)
