"""What stages do and keep: read off the programs that run, as these say it themselves."""

from itertools import product
from random import Random

import numpy as np
import pytest

from penstock.costs.records import LayerSeconds
from penstock.errors import ConfigError
from penstock.planner.mesh_candidates import most_kept
from penstock.planner.stage_work import StageWork, Tables, steady, work_of
from penstock.schedules import ALL_SCHEDULES, gpipe, one_f_one_b, zb_h1
from penstock.schedules.family import Family
from penstock.schedules.ir import Schedule
from penstock.schedules.memory import Kept, Sizes, live_bytes, peak_bytes
from penstock.schedules.passes import add_offload, add_recompute
from penstock.types import Recompute, RecomputePolicy

SOME = Recompute.layers(1)


def work(family: Family, policy: RecomputePolicy = Recompute.STAGE) -> tuple[StageWork, ...]:
    return work_of(family, 3, 6, () if policy is Recompute.NEVER else range(3))


def test_1f1b_keeps_fewer_micro_batches_toward_the_end_and_recomputes_none_there() -> None:
    assert [each.most_kept for each in work(one_f_one_b)] == [3, 2, 1]
    assert [each.recomputes for each in work(one_f_one_b)] == [1, 1, 0]


def test_gpipe_keeps_all_and_recomputes_all() -> None:
    assert [each.most_kept for each in work(gpipe)] == [6, 6, 6]
    assert [each.recomputes for each in work(gpipe)] == [1, 1, 1]
    assert [each.recomputes for each in work(gpipe, Recompute.NEVER)] == [0, 0, 0]


def test_weights_that_wait_are_kept_beside_graphs() -> None:
    last = work(zb_h1(), Recompute.NEVER)[-1]
    assert (last.wholes, last.halves, last.most_kept) == (0, 1, 3)
    assert max(times.weights for times in last.held) == 3


def test_a_layer_takes_its_recompute_only_where_it_is_recomputed() -> None:
    layer = LayerSeconds(
        forward_s=1.0, recompute_s=1.5, backward_s=2.0, input_s=1.25, weight_s=1.25
    )
    first, last = work(one_f_one_b, SOME)[0], work(zb_h1(), Recompute.NEVER)[-1]
    assert first.seconds([layer] * 3, SOME) == (3.0, 4.5, 3.0)
    assert first.seconds([layer], Recompute.STAGE) == (4.5,)
    assert last.seconds([layer], Recompute.NEVER) == (3.5,)


def stage_peak(schedule: Schedule, stage: int, kept: Kept) -> int:
    """Return the most that one stage keeps, from its program."""
    program = schedule.programs[schedule.ranks[stage]]
    own = [x for x in program if x.stage == stage]
    return max(live_bytes(tuple(own), [kept] * schedule.num_stages))


@pytest.mark.parametrize("family", ALL_SCHEDULES, ids=repr)
def test_what_is_held_gives_the_peak_of_any_sizes(family: Family) -> None:
    random = Random(0)
    for num_stages, num_microbatches in ((4, 1), (4, 3), (8, 5), (4, 9)):
        if num_stages % family.stages_per_rank:
            continue
        twice = [stage for stage in range(num_stages) if random.random() < 0.5]
        away = [stage for stage in range(num_stages) if random.random() < 0.5]
        found = work_of(family, num_stages, num_microbatches, twice, away)
        schedule = steady(family, num_stages, num_microbatches)
        schedule = add_offload(add_recompute(schedule, twice), away)
        for stage, of_stage in enumerate(found):
            inputs = random.randint(0, 50)
            stays = random.randint(0, inputs)
            graph, weights = inputs + random.randint(0, 100), random.randint(0, 100)
            peak = of_stage.peak_bytes(Tables(*map(np.array, (graph, inputs, weights, stays))))
            assert peak == stage_peak(schedule, stage, Kept(graph, inputs, weights, stays))


@pytest.mark.parametrize("family", ALL_SCHEDULES, ids=repr)
def test_few_micro_batches_tell_how_many_are_kept_of_many(family: Family) -> None:
    for num_stages, num_microbatches in product((4, 6, 8), (1, 3, 16, 24, 32, 33, 48, 96)):
        try:
            work = work_of(family, num_stages, num_microbatches, range(num_stages))
        except ConfigError:
            continue
        kept = tuple(each.most_kept for each in work)
        assert kept == most_kept(family, num_stages, num_microbatches), (num_stages, kept)


def test_with_a_stage_on_each_rank_these_are_the_peaks_of_ranks() -> None:
    sizes = Sizes(kept_bytes=10, input_bytes=3, weight_bytes=4)
    for family in (gpipe, one_f_one_b, zb_h1()):
        schedule = add_recompute(family(3, 6))
        peaks = (each.peak_bytes(Tables(*map(np.array, (10, 3, 4, 0)))) for each in work(family))
        assert tuple(map(int, peaks)) == peak_bytes(schedule, sizes)
