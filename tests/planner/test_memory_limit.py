"""What is recomputed to fit a limit: the first choice that fits, or how much is missing."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.costs.layer_facts import LayerBytes
from penstock.errors import ConfigError
from penstock.planner.memory_limit import Policy, fitted, peak_of
from penstock.planner.plan import Plan
from penstock.planner.stage_work import steady
from penstock.schedules import (
    ALL_SCHEDULES,
    gpipe,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    zb_h2,
)
from penstock.schedules.family import Family
from penstock.schedules.memory import Sizes, peak_bytes
from penstock.schedules.names import ASYNCHRONOUS_SCHEDULES
from penstock.schedules.versions import num_versions
from penstock.types import Recompute
from tests.planner.plans import plan

WIDE = LayerBytes(inner=100, inputs=10, saved_inputs=10, results=10, saved_results=0)
NARROW = LayerBytes(inner=30, inputs=10, saved_inputs=0, results=10, saved_results=10)
LAYERS = (WIDE, NARROW, WIDE, NARROW)
WEIGHTS = (40, 2, 500, 0)
SECONDS = (1.0, 0.1, 2.0, 0.1)
ALL_OF_STAGE_0 = 10 + 100 + 30 + 10  # its input, both insides, the second result
ALL_OF_STAGE_1 = ALL_OF_STAGE_0 + 10  # and the loss


def limited(*limit: int, offload: bool = False) -> Plan:
    """Give a plan of two stages of two layers, with a limit for each rank."""
    of_two = plan(2, 2, schedule=gpipe, num_microbatches=4)
    return replace(of_two, memory_limit_bytes=limit, offload=(offload, offload))


def fit(asked: Plan) -> Plan:
    return fitted(asked, LAYERS, SECONDS, WEIGHTS)


def test_where_all_fits_nothing_is_recomputed() -> None:
    found = fit(limited(4 * ALL_OF_STAGE_0, 4 * ALL_OF_STAGE_1))
    assert found.recompute == (Recompute.NEVER, Recompute.NEVER)
    assert found.predicted_peak_bytes == (4 * ALL_OF_STAGE_0, 4 * ALL_OF_STAGE_1)


def test_the_layer_that_frees_most_bytes_a_second_comes_first() -> None:
    found = fit(limited(4 * ALL_OF_STAGE_0 - 1, 10**6))
    assert found.recompute == (Recompute.layers(1), Recompute.NEVER)
    assert found.predicted_peak_bytes == (3 * 120 + 150, 4 * ALL_OF_STAGE_1)


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
    with pytest.raises(ConfigError, match=r"70 bytes too few.*180.*Give offload=True, more and"):
        fit(limited(110, 10**6))
    with pytest.raises(ConfigError, match="moved away it still keeps"):
        fit(limited(110, 10**6, offload=True))


def test_schedules_that_fit_are_named_where_parts_that_wait_for_their_weights_do_not() -> None:
    waiting = [layer._replace(left=90) for layer in LAYERS]

    def fit_with(schedule: Family, limit: int) -> Plan:
        asked = replace(limited(limit, limit), schedule=schedule)
        return fitted(asked, waiting, SECONDS, WEIGHTS)

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


@settings(max_examples=200)
@given(st.data())
def test_whatever_is_chosen_fits_and_nothing_is_chosen_without_need(data: st.DataObject) -> None:
    partition = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    count = sum(partition)
    sizes = st.integers(0, 50)
    of_layers = [
        LayerBytes(*data.draw(st.tuples(*[sizes] * 5)))._replace(saved_inputs=0, saved_results=0)
        for _ in range(count)
    ]
    seconds = data.draw(st.lists(st.floats(0, 9), min_size=count, max_size=count))
    family = data.draw(st.sampled_from([f for f in ALL_SCHEDULES if f.stages_per_rank == 1]))
    asked = plan(*partition, schedule=family, num_microbatches=data.draw(st.integers(1, 6)))
    limits = data.draw(st.tuples(*[st.integers(0, 900)] * len(partition)))
    asked = replace(asked, memory_limit_bytes=limits)
    schedule = family(len(partition), asked.num_microbatches)
    nothing = Policy((Recompute.NEVER,) * len(partition), asked.offload)
    stages = Policy((Recompute.STAGE,) * len(partition), asked.offload)

    def peaks(policy: Policy) -> list[int]:
        ranks = range(len(partition))
        return [peak_of(rank, schedule, asked, policy, of_layers) for rank in ranks]

    try:
        found = fitted(asked, of_layers, seconds, [99] * count)
    except ConfigError:
        assert any(a > b for a, b in zip(peaks(stages), limits, strict=True))
        return
    assert found.predicted_peak_bytes == tuple(peaks(Policy(found.recompute, found.offload)))
    assert all(a <= b for a, b in zip(found.predicted_peak_bytes, limits, strict=True))
    for stage, peak in enumerate(peaks(nothing)):
        assert (peak <= limits[stage]) == (found.recompute[stage] is Recompute.NEVER)


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
    with pytest.raises(ConfigError, match=r"160 of 4 micro-batches and 42 in older versions"):
        fit(replace(asked, memory_limit_bytes=(60, 10**6)))


def test_versions_that_do_not_fit_are_refused_with_rank_stage_and_number() -> None:
    asked = replace(limited(10**6, 499), schedule=pipedream(vertical_sync=True))
    told = r"=499 on rank 1: 1 bytes too few.*_sync=True.* 2 versions of 500 bytes on stage 1"
    with pytest.raises(ConfigError, match=told):
        fit(asked)
    with pytest.raises(ConfigError, match=r"on rank 1: 1 bytes too few.*pipedream_2bw keeps 2"):
        fit(replace(asked, schedule=pipedream_2bw))
    with pytest.raises(ConfigError, match=r"still keeps"):  # one version: only activations
        fit(replace(asked, schedule=pipedream(), memory_limit_bytes=(10**6, 150)))


@pytest.mark.parametrize("family", ASYNCHRONOUS_SCHEDULES, ids=repr)
def test_no_longer_window_keeps_more(family: Family) -> None:
    one = Sizes(kept_bytes=1)
    for num_stages in range(1, 6):
        for num_microbatches in range(1, 7):
            short = steady(family, num_stages, num_microbatches)
            long = family(num_stages, num_microbatches, 20)
            assert num_versions(short) == num_versions(long)
            assert peak_bytes(short, one) == peak_bytes(long, one)
