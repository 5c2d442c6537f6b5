"""Prices of stages: what fits, on which device, and what messages add."""

from dataclasses import replace
from itertools import pairwise
from math import isfinite
from random import Random

import pytest

from penstock.costs.cluster import Route
from penstock.costs.records import AtSize, LayerSeconds, LayerWeights
from penstock.planner.cuts import Setting, cut_over_devices, each_layer
from penstock.planner.fit import Fitted, fit
from penstock.planner.price import Neighbours, OnDevice, StagePrices
from penstock.planner.stage_bytes import StageBytes
from penstock.planner.stage_work import steady
from penstock.schedules import gpipe, one_f_one_b, pipedream, zb_h1
from penstock.schedules.family import Family
from penstock.schedules.memory import live_bytes, version_bytes
from penstock.schedules.passes import add_recompute
from penstock.types import Recompute
from tests.planner.at_sizes import chain, drawn


def layer(seconds: float) -> LayerSeconds:
    return LayerSeconds(
        forward_s=seconds,
        recompute_s=seconds,
        backward_s=2 * seconds,
        input_s=seconds,
        weight_s=seconds,
    )


def weights_of(parameters: int, gradients: int, optimizer: int, buffers: int) -> LayerWeights:
    return LayerWeights(
        parameter_bytes=parameters,
        gradient_bytes=gradients,
        optimizer_bytes=optimizer,
        buffer_bytes=buffers,
    )


@pytest.mark.parametrize("family", (gpipe, one_f_one_b, zb_h1(), pipedream()), ids=repr)
def test_a_stage_fits_where_the_peak_of_its_rank_does(family: Family) -> None:
    """By one option or the other, and as a policy for all stages that is then in the cut."""
    random, seen = Random(0), set()
    for seed in range(60):
        at = drawn(seed)
        num_layers = len(at.kind_of)
        num_stages = random.randint(1, num_layers)
        ends = [0, *sorted(random.sample(range(1, num_layers), num_stages - 1)), num_layers]
        sizes = [b - a for a, b in pairwise(ends)]
        weights = [weights_of(*random.choices(range(99), k=4)) for _ in range(num_layers)]
        of_stages, limit = StageBytes(at), random.randint(500, 4000)
        prices = StagePrices(
            family=family,
            num_stages=num_stages,
            num_microbatches=4,
            devices=[OnDevice(seconds=[layer(1.0)] * num_layers, memory_bytes=limit)],
            kinds=[0] * num_stages,
            of_stages=of_stages,
            lasting=[each.total_bytes for each in weights],
            versioned=[each.parameter_bytes for each in weights],
        )
        schedule = steady(family, num_stages, 4)
        parameters = [sum(w.parameter_bytes for w in weights[a:b]) for a, b in pairwise(ends)]
        older = version_bytes(schedule, parameters)
        fits = [False] * num_stages
        for policy in (Recompute.NEVER, Recompute.STAGE):
            twice = range(num_stages) if policy is Recompute.STAGE else []
            kept = of_stages.kept_by(sizes, (policy,) * num_stages)
            programs = add_recompute(schedule, twice).programs
            peaks = [max(live_bytes(program, kept)) for program in programs]
            for stage, bounds in enumerate(pairwise(ends)):
                there = sum(each.total_bytes for each in weights[slice(*bounds)])
                fits[stage] |= peaks[stage] + there + older[stage] <= limit
        for stage, bounds in enumerate(pairwise(ends)):
            assert isfinite(prices.least_s(stage)[bounds]) == fits[stage]
        if all(fits):
            assert isinstance(fit(prices, sizes), Fitted)
        seen.update(fits)
    assert seen == {False, True}


def prices_of_chain(route: Route | None, *speeds: float, at: AtSize | None = None) -> StagePrices:
    """Return the prices of 6 layers in three stages of 1F1B on devices of such speeds, with one
    route between all stages.
    """
    return StagePrices(
        family=one_f_one_b,
        num_stages=3,
        num_microbatches=4,
        devices=[OnDevice(seconds=[layer(1 / speed)] * 6) for speed in speeds],
        kinds=[0] * 3,
        of_stages=StageBytes(at or chain(6)),
        lasting=[0] * 6,
        recompute=(Recompute.STAGE,) * 3,
        neighbours=lambda at: Neighbours(route, route),
    )


def test_the_last_stage_of_1f1b_has_most_layers_and_a_slow_device_fewest() -> None:
    """Of 1F1B's stages only the last recomputes nothing: 1 (4 / 0.5), 2 (4), 3 (3)."""
    found = cut_over_devices((2, 1), 3, prices_of_chain(None, 1.0, 0.5).seconds, each_layer(6))
    assert found in (((1, 2, 3), (1, 0, 0)), ((2, 1, 3), (0, 1, 0)))


def test_messages_that_block_keep_a_stage_and_others_set_the_pace_of_their_link() -> None:
    """10 bytes leave a stage for each neighbour, as many come back."""
    plain = prices_of_chain(None, 1.0).seconds(Setting(1))[2, 4]
    for route, more in (
        (Route((), 5.0, 10.0), 0.0),
        (Route((), 5.0, 1.0), 10.0 - plain),
        (Route((), 5.0, 10.0, overhead_s=0.25), 4 * 0.25),
        (Route((), 5.0, 10.0, blocks=True), 2 * (5.0 + 1.0)),
    ):
        prices = prices_of_chain(route, 1.0)
        assert prices.seconds(Setting(1))[2, 4] == plain + more
    assert plain == 2 * 4


def test_what_has_no_gradient_is_not_sent_back() -> None:
    at = chain(6)
    numbers = replace(at, values=tuple(replace(v, has_gradient=False) for v in at.values))
    route = Route((), 5.0, 10.0, blocks=True)
    prices = prices_of_chain(route, 1.0, at=numbers)
    assert prices.seconds(Setting(1))[2, 4] == 2 * 4 + (5.0 + 1.0) + 5.0
