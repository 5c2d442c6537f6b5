"""Stages balanced by what their layers take, and cut so that what they keep fits a limit."""

from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.costs.records import AtSize, LayerKind, LayerSeconds, Value
from penstock.errors import ConfigError
from penstock.planner.balance import Measured, balanced
from penstock.planner.cuts import each_layer
from penstock.planner.plan import BalancedBy, Plan
from penstock.planner.stage_bytes import StageBytes
from penstock.planner.stage_work import steady
from penstock.schedules import (
    ALL_SCHEDULES,
    gpipe,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    zb_h1,
    zb_h2,
)
from penstock.schedules.family import Family
from penstock.schedules.ir import BackwardInput
from penstock.schedules.memory import Sizes, live_bytes, num_versions, peak_bytes
from penstock.schedules.names import ASYNCHRONOUS_SCHEDULES
from penstock.schedules.passes import add_offload, add_recompute
from penstock.types import Recompute, RecomputePolicy
from tests.planner.at_sizes import drawn
from tests.planner.plans import plan

SPANS = [(n, n + 1) for n in range(14)]


def seconds_of(forward_s: float, backward_s: float) -> LayerSeconds:
    return LayerSeconds(
        forward_s=forward_s,
        recompute_s=forward_s,
        backward_s=backward_s,
        input_s=backward_s / 2,
        weight_s=backward_s / 2,
    )


def uncut(*partition: int, schedule: Family, num_microbatches: int = 6) -> Plan:
    """Return a plan whose layers are to be cut anew."""
    given = plan(*partition, schedule=schedule, num_microbatches=num_microbatches)
    return replace(given, balanced_by=BalancedBy.PARAMETERS)


def alike(count: int) -> Measured:
    return Measured([seconds_of(1.0, 2.0)] * count)


@pytest.mark.parametrize(
    "schedule, recompute, partition",
    [
        (gpipe, (Recompute.STAGE, Recompute.STAGE), (7, 7)),
        (one_f_one_b, (Recompute.STAGE, Recompute.STAGE), (6, 8)),
        (one_f_one_b, (Recompute.NEVER, Recompute.NEVER), (7, 7)),
        (gpipe, (Recompute.STAGE, Recompute.NEVER), (6, 8)),
    ],
)
def test_a_stage_that_recomputes_less_gets_more_layers(
    schedule: Family, recompute: tuple[Recompute, ...], partition: tuple[int, int]
) -> None:
    """In 1F1B the last stage's backwards follow at once: 6 (2 + 2) = 8 (1 + 2)."""
    before = replace(uncut(1, 13, schedule=schedule), recompute=recompute)
    assert balanced(before, alike(14), SPANS).partition == partition


def test_layers_cost_their_recompute_on_whichever_stage_they_come_to_be() -> None:
    every_layer = (Recompute.layers(*range(13)),) * 2
    before = replace(uncut(13, 1, schedule=gpipe), recompute=every_layer)
    assert balanced(before, alike(14), SPANS).partition == (7, 7)


def test_a_plan_that_is_balanced_says_what_each_stage_takes() -> None:
    found = balanced(uncut(4, 2, schedule=gpipe), alike(6), SPANS[:6])
    assert (found.partition, found.balanced_by) == ((3, 3), BalancedBy.TIME)
    assert found.predicted_s == (12.0, 12.0)
    assert "slowest stage 12 s a micro-batch, 1.00 times the mean" in str(found)


# -- under a limit of memory --------------------------------------------------------------------

# Four layers of a chain that hand 10 bytes on.  The wide ones keep 100 inside and what comes in,
# the narrow ones 30 and what they give; a loss saves about as much as it is given.
INSIDE = (100, 30, 100, 30)
WEIGHTS = (40, 2, 500, 0)
SECONDS = (1.0, 0.1, 2.0, 0.1)
ALL_OF_STAGE_0 = 10 + 100 + 30 + 10  # its input, both insides, the second result
ALL_OF_STAGE_1 = ALL_OF_STAGE_0 + 10  # and the loss


def chain(inside: tuple[int, ...] = INSIDE, *, left: int = 0, of_loss: int = 10) -> AtSize:
    num_layers = len(inside)
    return AtSize(
        microbatch_size=1,
        kinds=tuple(LayerKind(operators=(), inner_bytes=x, left_bytes=left) for x in inside),
        kind_of=tuple(range(num_layers)),
        values=tuple(
            Value(n - 1, (n,) if n < num_layers else (), 10, n) for n in range(num_layers + 1)
        ),
        saved=tuple((n + n % 2,) for n in range(num_layers)),
        loss=LayerKind(operators=(), inner_bytes=of_loss, left_bytes=0),
    )


def measured(left: int = 0) -> Measured:
    return Measured([seconds_of(s, 2 * s) for s in SECONDS], chain(left=left), WEIGHTS)


def limited(*limit: int, offload: bool = False) -> Plan:
    """Return a plan of two stages of two layers, by hand, with a limit for each rank."""
    of_two = plan(2, 2, schedule=gpipe, num_microbatches=4)
    return replace(of_two, memory_limit_bytes=limit, offload=(offload, offload))


def fit(asked: Plan) -> Plan:
    return balanced(asked, measured(), each_layer(4))


def test_where_all_fits_nothing_is_recomputed() -> None:
    found = fit(limited(4 * ALL_OF_STAGE_0, 4 * ALL_OF_STAGE_1))
    assert found.recompute == (Recompute.NEVER, Recompute.NEVER)
    assert found.predicted_peak_bytes == (4 * ALL_OF_STAGE_0, 4 * ALL_OF_STAGE_1)


def test_the_layer_that_frees_most_bytes_a_second_comes_first() -> None:
    found = fit(limited(4 * ALL_OF_STAGE_0 - 1, 10**6))
    assert found.recompute == (Recompute.layers(1), Recompute.NEVER)
    again = 10 + 100 + 10 + 30 + 10  # while layer 1 runs again, its input is there too
    assert found.predicted_peak_bytes == (3 * 120 + again, 4 * ALL_OF_STAGE_1)


def test_a_stage_comes_after_its_layers_and_moving_away_last() -> None:
    whole = 10 * 3 + ALL_OF_STAGE_1
    assert fit(limited(10**6, whole)).recompute[1] is Recompute.STAGE
    with pytest.raises(ConfigError, match=r"on rank 1 .stage 1.: 1 bytes too few"):
        fit(limited(10**6, whole - 1))
    found = fit(limited(10**6, whole - 1, offload=True))
    assert found.offload == (False, True)
    assert found.predicted_peak_bytes is not None
    assert found.predicted_peak_bytes[1] == 10 + ALL_OF_STAGE_1


def test_what_never_fits_is_refused_with_what_would_help() -> None:
    with pytest.raises(ConfigError, match=r"60 bytes too few.*170.*Give offload=True, more and"):
        fit(limited(110, 10**6))
    with pytest.raises(ConfigError, match="moved away it still keeps"):
        fit(limited(110, 10**6, offload=True))


def test_schedules_that_fit_are_named_where_parts_that_wait_for_their_weights_do_not() -> None:
    def fit_with(schedule: Family, limit: int) -> Plan:
        asked = replace(limited(limit, limit), schedule=schedule)
        return balanced(asked, measured(left=90), each_layer(4))

    with pytest.raises(ConfigError, match=r"bytes too few") as caught:
        fit_with(zb_h2(), 240)
    fitting = str(caught.value).partition("or a schedule that fits: ")[2].split(" or ")
    assert fitting == ["gpipe", "one_f_one_b", "eager_1f1b"]
    for family in ALL_SCHEDULES:
        if family.name in fitting:
            assert max(fit_with(family, 240).predicted_peak_bytes or ()) <= 240
        else:
            with pytest.raises(ConfigError, match="or a schedule that fits: gpipe"):
                fit_with(family, 240)
    with pytest.raises(ConfigError, match=r"more stages$"):
        fit_with(zb_h2(), 10)
    with pytest.raises(ConfigError, match=r"more stages$"):  # others compute something else
        fit_with(pipedream_2bw, 60)


def peaks(
    asked: Plan, at: AtSize, recompute: tuple[RecomputePolicy, ...], offload: tuple[bool, ...]
) -> list[int]:
    """Return the most that each rank keeps, from the program that it runs."""
    schedule = steady(asked.schedule, asked.num_stages, asked.num_microbatches)
    twice = [s for s, kind in enumerate(recompute) if kind is not Recompute.NEVER]
    away = [s for s, moves in enumerate(offload) if moves]
    whole = (Recompute.NEVER, Recompute.STAGE)
    by_layers = [s for s, kind in enumerate(recompute) if kind not in whole]
    schedule = add_offload(add_recompute(schedule, twice, by_layers), away)
    divides = {x.stage for x in schedule.instructions if isinstance(x, BackwardInput)}
    of_stages = StageBytes(at, copies_weights=False)  # between threads
    kept = of_stages.kept_by(asked.partition, recompute, divides)
    return [max(live_bytes(program, kept)) for program in schedule.programs]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_whatever_is_chosen_fits_and_nothing_is_chosen_without_need(data: st.DataObject) -> None:
    at = replace(drawn(data.draw(st.integers(0, 10**6))), loss=None)
    count = len(at.kind_of)
    seconds = data.draw(st.lists(st.floats(0, 9), min_size=count, max_size=count))
    family = data.draw(st.sampled_from(ALL_SCHEDULES))
    per_rank = family.stages_per_rank
    num_stages = per_rank * data.draw(st.integers(0, count // per_rank))
    if not num_stages:
        return
    ends = sorted(Random(count).sample(range(1, count), num_stages - 1))
    asked = plan(
        *(b - a for a, b in pairwise((0, *ends, count))),
        schedule=family,
        num_microbatches=data.draw(st.integers(1, 6)),
    )
    limits = tuple(data.draw(st.integers(0, 9000)) for _ in range(asked.placement.num_places))
    moves = data.draw(st.booleans())
    asked = replace(asked, memory_limit_bytes=limits, offload=(moves,) * num_stages)
    nothing, whole = (Recompute.NEVER,) * num_stages, (Recompute.STAGE,) * num_stages
    stays = (False,) * num_stages
    kept = Measured([seconds_of(s, s) for s in seconds], at, [99] * count)
    try:
        found = balanced(asked, kept, each_layer(count))
    except ConfigError:
        least = peaks(asked, at, whole, asked.offload)
        assert any(a > b for a, b in zip(least, limits, strict=True))
        return
    assert found.predicted_peak_bytes is not None
    assert list(found.predicted_peak_bytes) == peaks(asked, at, found.recompute, found.offload)
    assert all(a <= b for a, b in zip(found.predicted_peak_bytes, limits, strict=True))
    for rank, peak in enumerate(peaks(asked, at, nothing, stays)):
        own = [s for s, place in enumerate(asked.placement.places) if place == rank]
        is_untouched = all(found.recompute[stage] is Recompute.NEVER for stage in own)
        assert (peak <= limits[rank]) == is_untouched


def test_a_limit_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 3 entries, and the pipeline 2 ranks"):
        limited(1, 2, 3)
    with pytest.raises(ConfigError, match="memory_limit_bytes=-1; it must be a whole number"):
        limited(1, -1)
    assert "bytes kept by rank: ? predicted, at most 1, 2" in str(limited(1, 2))
    assert plan(1, 1, schedule=one_f_one_b).memory_limit_bytes is None


def test_versions_of_weights_count_before_activations_are_chosen_for() -> None:
    whole = 2 * ALL_OF_STAGE_0  # pipedream keeps two micro-batches alive, and two versions
    asked = replace(limited(whole + 42, 10**6), schedule=pipedream())
    found = fit(asked)
    assert found.recompute == (Recompute.NEVER, Recompute.NEVER)
    assert found.predicted_peak_bytes == (whole + 42, ALL_OF_STAGE_1)
    assert fit(replace(asked, memory_limit_bytes=(whole + 41, 10**6))).recompute[0] != (
        Recompute.NEVER
    )
    with pytest.raises(ConfigError, match=r"130 of 4 micro-batches and 42 in older versions"):
        fit(replace(asked, memory_limit_bytes=(60, 10**6)))


def test_versions_that_do_not_fit_are_refused_with_rank_stage_and_number() -> None:
    asked = replace(limited(10**6, 499), schedule=pipedream(vertical_sync=True))
    told = r"=499 on rank 1: 1 bytes too few.*_sync=True.* 2 versions of 500 bytes on stage 1"
    with pytest.raises(ConfigError, match=told):
        fit(asked)
    with pytest.raises(ConfigError, match=r"on rank 1: 1 bytes too few.*pipedream_2bw keeps 2"):
        fit(replace(asked, schedule=pipedream_2bw))
    with pytest.raises(ConfigError, match=r"still keeps"):  # one version: only activations
        fit(replace(asked, schedule=pipedream(), memory_limit_bytes=(10**6, 100)))


@pytest.mark.parametrize("family", ASYNCHRONOUS_SCHEDULES, ids=repr)
def test_no_longer_window_keeps_more(family: Family) -> None:
    one = Sizes(kept_bytes=1)
    for num_stages in range(1, 6):
        for num_microbatches in range(1, 7):
            short = steady(family, num_stages, num_microbatches)
            long = family(num_stages, num_microbatches, 20)
            assert num_versions(short) == num_versions(long)
            assert peak_bytes(short, one) == peak_bytes(long, one)


@pytest.mark.parametrize("family", (gpipe, one_f_one_b, zb_h1(), pipedream()), ids=repr)
@pytest.mark.parametrize("may_offload", (False, True))
def test_a_cut_that_fits_is_found_wherever_there_is_one(family: Family, may_offload: bool) -> None:
    random, found = Random(2), []
    for seed in range(40):
        at = drawn(seed + 1000)
        num_layers = len(at.kind_of)
        if num_layers < 2:
            continue
        num_stages = random.randint(2, num_layers)
        limits = tuple(random.randint(500, 9000) for _ in range(num_stages))
        kept = Measured(
            [seconds_of(s, 2 * s) for s in (random.uniform(0.1, 1.0) for _ in range(num_layers))],
            at,
            [random.randint(0, 100) for _ in range(num_layers)],
        )
        cuts = [
            tuple(b - a for a, b in pairwise((0, *ends, num_layers)))
            for ends in combinations(range(1, num_layers), num_stages - 1)
        ]
        asked = replace(
            uncut(*cuts[0], schedule=family, num_microbatches=4),
            memory_limit_bytes=limits,
            offload=(may_offload,) * num_stages,
        )

        def fits(cut: tuple[int, ...], asked: Plan = asked, kept: Measured = kept) -> bool:
            by_hand = replace(asked, partition=cut, balanced_by=BalancedBy.HAND)
            try:
                balanced(by_hand, kept, each_layer(sum(cut)))
            except ConfigError:
                return False
            return True

        can_fit = any(map(fits, cuts))
        try:
            found.append(fits(balanced(asked, kept, each_layer(num_layers)).partition))
        except ConfigError:
            found.append(False)
        assert found[-1] == can_fit
    assert {*found} == {False, True}


def test_layers_go_where_there_is_room_for_them_without_recompute() -> None:
    """Eight alike in two stages of GPipe; the first has room for two with all that they save:
    3 (1 + 1 + 2) against 5 (1 + 2) is even enough, 2 (1 + 2) against 6 (1 + 2) is slower.
    """
    layers = Measured([seconds_of(1.0, 2.0)] * 8, chain((90,) * 8), [0] * 8)
    asked = replace(
        uncut(4, 4, schedule=gpipe, num_microbatches=4), memory_limit_bytes=(800, 9000)
    )
    found = balanced(asked, layers, each_layer(8))
    assert found.partition == (3, 5)
    assert found.recompute[0] is not Recompute.NEVER and found.recompute[1] is Recompute.NEVER
    assert found.predicted_s is not None
    assert found.predicted_s[1] == 15.0


def test_where_nothing_fits_it_is_told_by_how_much() -> None:
    layers = Measured([seconds_of(1.0, 2.0)] * 8, chain((90,) * 8), [0] * 8)
    asked = replace(uncut(1, 7, schedule=gpipe, num_microbatches=4), memory_limit_bytes=(5, 5))
    with pytest.raises(ConfigError, match=r"rank 0 .stage 0.: .* bytes too few"):
        balanced(asked, layers, each_layer(8))
