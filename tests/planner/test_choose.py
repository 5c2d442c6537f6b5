"""The plan that is chosen is the fastest of all that could be made."""

import re
from dataclasses import replace
from random import Random

import pytest

from penstock import plan
from penstock.automatic.plan_model import simulate
from penstock.costs.cluster import Cluster
from penstock.costs.profile import Profile
from penstock.costs.records import LayerKind, Operator, Part, Value
from penstock.errors import ConfigError
from penstock.planner.candidates import Constraints, Size, families, sizes
from penstock.planner.make_plan import plan_profile, slower_than
from penstock.planner.plan import Plan
from penstock.planner.predict import Prediction
from penstock.planner.rank import find_plans
from penstock.planner.search import Evaluator
from penstock.schedules.costs import UNIT_COSTS
from penstock.trace.units import bytes_text
from penstock.types import Recompute
from tests.profiles import chain, cluster

PLAIN = ("gpipe", "one_f_one_b", "eager_1f1b", "interleaved_1f1b", "breadth_first")
"""Schedules that are made for no costs: every one of them is predicted below."""


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_of_the_whole_space_is_faster_than_the_one_chosen(seed: int) -> None:
    random = Random(seed)
    found = chain(
        [random.choice((1.0, 1.0, 3.0)) for _ in range(6)],
        weight_bytes=random.choice((0, 4000, 10**7)),
        inner_bytes=random.choice((1000, 30_000)),
    )
    here = cluster(
        4,
        bytes_per_s=random.choice((100.0, 1e6)),
        memory_bytes=10**9 if seed % 2 else 10**5 + 5 * found.weights[0].total_bytes,
        busy_speed=random.choice(((), (1.0, 0.9, 0.8, 0.7))),
    )
    constraints = Constraints(batch_size=8, schedules=PLAIN)
    evaluator = Evaluator(found, here, constraints)
    steps_s = []
    for size in sizes(constraints, here, 1, 6):
        for family in families(constraints, size, UNIT_COSTS):
            made = evaluator.plan_of(size, family)
            if made is not None:
                steps_s.append(Prediction(made, found, here, 8).quick_step_s)
                assert steps_s[-1] >= evaluator.least_s(size) * (1 - 1e-9)
    assert find_plans([found], here, constraints).best[0].step_s == min(steps_s)


def test_the_same_input_gives_the_same_plan() -> None:
    one, other = (plan(chain([1.0, 2.0] * 3), cluster(4), 8) for _ in range(2))
    assert one == other
    assert Plan.from_json(one.to_json()) == one


def test_a_model_is_not_cut_where_messages_cost_more_than_they_save() -> None:
    slow = cluster(4, bytes_per_s=1.0, latency_s=100.0)
    chosen = plan(chain([0.01] * 6), slow, 8)
    assert (chosen.num_stages, chosen.placement.num_replicas) == (1, 1)
    assert any("the model is not cut" in line for line in chosen.why)


def test_the_unsplit_model_on_all_cores_may_win_and_is_always_compared() -> None:
    alone, together = chain([1.0] * 6), chain([0.4] * 6, threads=2)
    here = cluster(2, busy_speed=(1.0, 0.6))
    choice = plan_profile([alone, together], here, 8)
    assert (choice.plan.num_stages, choice.plan.threads_per_stage) == (1, 2)
    assert choice.unsplit_model is not None
    assert "1, 2 threads" in str(choice)


def test_a_rank_has_an_accelerator_whatever_threads_its_host_has() -> None:
    here = cluster(4)
    devices = {name: replace(each, torch_type="cuda") for name, each in here.devices.items()}
    constraints = Constraints(batch_size=8, num_ranks=4)
    chosen = plan(
        chain([1.0] * 6, threads=2), replace(here, devices=devices), 8, constraints=constraints
    )
    assert (chosen.num_stages >= 4, chosen.threads_per_stage) == (True, 1)
    assert chosen.placement.cluster_places in (None, (0, 1, 2, 3))


def test_the_unsplit_model_is_always_compared_however_slow_it_is() -> None:
    constraints = Constraints(batch_size=8, num_replicas=1)
    choices = find_plans([chain([1.0] * 16)], cluster(8), constraints, num_best=1)
    assert choices.best[0].size.num_ranks == 8
    assert choices.unsplit_model is not None
    assert choices.unsplit_model.step_s > 3 * choices.best[0].step_s


def test_the_unsplit_model_that_fits_nowhere_is_told_from_one_that_was_not_asked_for() -> None:
    constraints = Constraints(batch_size=8, num_ranks=2, num_replicas=1)
    model = chain([1.0] * 4, weight_bytes=10**6)
    asked = plan(model, cluster(2), 8, constraints=constraints)
    assert "the unsplit model is not what was asked for" in asked.why
    memory_bytes = sum(each.total_bytes for each in model.weights) * 8 // 10
    tight = plan(model, cluster(2, memory_bytes=memory_bytes), 8)
    assert "the unsplit model fits no device" in tight.why


def test_a_model_that_is_not_cut_keeps_one_micro_batch_and_recomputes_nothing() -> None:
    model = chain([1.0] * 4, inner_bytes=10**6)
    weights = sum(w.total_bytes for w in model.weights)
    here = cluster(2, memory_bytes=round((weights + 4.5 * 10**6) / 0.9))  # one micro-batch fits
    constraints = Constraints(batch_size=8, num_ranks=1, num_microbatches=4)
    chosen = plan(model, here, 8, constraints=constraints)
    assert (chosen.schedule.name, chosen.recompute) == ("one_f_one_b", (Recompute.NEVER,))
    assert chosen.predicted_s == pytest.approx((12.0,), rel=1e-5)
    asked = plan(model, here, 8, constraints=replace(constraints, schedules=("gpipe",)))
    assert asked.schedule.name == "gpipe" and len(asked.recomputing) == 1


@pytest.mark.parametrize("name", ("one_f_one_b", "gpipe", "zb_h1"))
def test_a_schedule_that_was_asked_for_is_that_of_one_stage_too(name: str) -> None:
    constraints = Constraints(batch_size=8, num_ranks=1, schedules=(name,))
    assert plan(chain([1.0] * 4), cluster(1), 8, constraints=constraints).schedule.name == name


def test_a_schedule_of_several_stages_on_a_rank_never_stands_for_one_of_one() -> None:
    found = families(Constraints(batch_size=8), Size(2, 1, 4), UNIT_COSTS)
    assert all(("stages_per_rank", 1) not in family.arguments for family in found)
    only = Constraints(batch_size=8, num_ranks=1, schedules=("interleaved_1f1b",))
    with pytest.raises(ConfigError, match=r"no plan is possible.*none of these schedules runs"):
        find_plans([chain([1.0] * 4)], cluster(1), only)


def test_of_plans_that_are_as_fast_the_one_on_fewest_devices_is_chosen() -> None:
    slow = cluster(4, bytes_per_s=1e9, latency_s=0.0)
    model = chain([1.0, 100.0], inner_bytes=10)  # nothing is gained by a second device
    constraints = Constraints(batch_size=1)
    choices = find_plans([model], slow, constraints)
    assert choices.best[0].num_devices == 1
    assert plan(model, slow, 1).num_stages == 1


def test_the_plan_is_the_same_however_many_others_are_listed() -> None:
    model, here = chain([1.0, 2.0] * 3), cluster(4)
    plans = [plan_profile(model, here, 8, num_best=n).plan for n in (1, 2, 5)]
    assert len({(each.partition, each.schedule, each.placement) for each in plans}) == 1


def test_what_a_candidate_spends_more_and_less_adds_up_to_how_much_slower_it_is() -> None:
    choices = find_plans([chain([1.0, 2.0] * 3)], cluster(4), Constraints(batch_size=8))
    why_slower, several = slower_than(choices.best[0]), 0
    for found in choices.best[1:]:
        told = why_slower(found)
        parts = [float(x) for x in re.findall(r"([-+]?[\d.]+)%", told)]
        total = 0.0 if told.startswith("as fast: ") else parts.pop(0)
        assert abs(sum(parts) - total) < 0.5 + 0.05 * (1 + len(parts))
        several += len(parts) > 2
    assert several


def test_what_does_not_fit_is_recomputed() -> None:
    big = chain([1.0] * 4, inner_bytes=10**6)
    asked = Constraints(batch_size=4, num_microbatches=4, num_ranks=2, num_replicas=1)
    roomy = plan(big, cluster(2), 4, constraints=asked)
    assert set(roomy.recompute) == {Recompute.NEVER}
    weights = sum(w.total_bytes for w in big.weights[:2])
    # of the first stage's two micro-batches, of 2 MB each
    small = cluster(2, memory_bytes=round((weights + 3.2 * 10**6) / 0.9))
    tight = plan(big, small, 4, constraints=asked)
    assert set(tight.recompute) != {Recompute.NEVER}
    told = Prediction(tight, big, small, 4).timeline
    assert max(told.peak_bytes_of_ranks()) <= 0.9 * small.devices["a"].memory_bytes


@pytest.mark.parametrize(
    "seeds", (range(20), pytest.param(range(20, 140), marks=pytest.mark.slow)), ids=len
)
def test_no_plan_of_the_list_is_above_its_limit_of_memory_by_its_own_simulation(
    seeds: range,
) -> None:
    num_tight = 0
    for seed in seeds:
        found, here, constraints = drawn(Random(seed))
        try:
            choices = find_plans([found], here, constraints)
        except ConfigError as error:
            assert "lacks -" not in str(error)
            continue
        for each in (*choices.best, *filter(None, [choices.unsplit_model])):
            peaks = simulate(found, here, each.plan).peak_bytes_of_ranks()
            for rank, peak in enumerate(peaks):
                devices = [here.device_of(place) for place in each.predicted.places]
                room = min(x.memory_bytes for x in devices[rank :: len(peaks)])
                assert peak <= 0.9 * room, (seed, each.plan.choices)
                num_tight += peak > 0.8 * room
    assert num_tight > len(seeds) / 8  # else the limits are none


def drawn(random: Random) -> tuple[Profile, Cluster, Constraints]:
    """Draw a model with messages of any size, devices that it may just fit, and a batch."""
    count = random.randint(2, 6)
    inner_bytes, message_bytes = random.choice(((1000, 100), (1000, 3000), (10, 3000)))
    found = chain(
        [random.choice((0.1, 1.0, 3.0)) for _ in range(count)],
        inner_bytes=inner_bytes,
        weight_bytes=random.choice((10, 1000)),
    )
    (at,) = found.sizes
    values = tuple(replace(v, num_bytes=random.randint(1, message_bytes)) for v in at.values)
    if random.random() < 0.5:  # a weight of both ends comes with each micro-batch
        size = random.randint(1, message_bytes)
        values += (Value(0, (count - 1,), size, len(values), is_weight=True),)
    found = replace(found, sizes=(replace(at, values=values),))
    weights = sum(each.total_bytes for each in found.weights)
    of_batch = count * (inner_bytes + message_bytes)
    here = cluster(
        random.randint(1, 4),
        bytes_per_s=random.choice((100.0, 1e4, 1e6)),
        memory_bytes=round(weights * random.uniform(0.3, 1.2) + of_batch * random.uniform(0.3, 3)),
    )
    (host,), (device,) = here.hosts, here.devices.values()
    small = replace(device, memory_bytes=round(device.memory_bytes * 0.7))
    names = tuple(random.choice((device.name, "small")) for _ in host.devices)
    here = replace(
        here,
        devices={device.name: device, "small": small},
        hosts=(replace(host, devices=names),),
    )
    limited = random.random() < 0.5
    constraints = Constraints(
        batch_size=random.choice((4, 8)),
        num_microbatches=random.choice((None, 2, 4)),
        schedules=(random.choice(PLAIN),) if limited else None,
    )
    return found, here, constraints


def test_what_fits_no_other_way_moves_to_the_host_where_the_device_says_how_fast() -> None:
    model = chain([1.0] * 4, inner_bytes=100, weight_bytes=0)
    (at,) = model.sizes
    small_input = replace(at.values[0], num_bytes=1)
    model = replace(model, sizes=(replace(at, values=(small_input, *at.values[1:])),))
    here = cluster(2, memory_bytes=2000)
    devices = {"a": replace(here.devices["a"], host_bytes_per_s=1e5)}
    constraints = Constraints(
        batch_size=32, num_ranks=2, num_microbatches=32, schedules=("gpipe",)
    )
    with pytest.raises(ConfigError, match="would help: offload"):
        plan(model, here, 32, constraints=constraints)
    chosen = plan(model, replace(here, devices=devices), 32, constraints=constraints)
    assert any(chosen.offload)
    with pytest.raises(ConfigError, match="fits nowhere"):
        plan(
            model,
            replace(here, devices=devices),
            32,
            constraints=replace(constraints, offload=False),
        )


def test_what_fits_nowhere_says_by_how_much_and_what_would_help() -> None:
    with pytest.raises(ConfigError, match=r"fits nowhere: .* lacks .* What would help: offload"):
        plan(chain([1.0] * 4, weight_bytes=10**9), cluster(2, memory_bytes=10**6), 8)


def test_what_is_said_to_be_missing_is_the_least_of_all_candidates() -> None:
    found, here = chain([1.0] * 6, inner_bytes=5000), cluster(3, memory_bytes=4000)
    constraints = Constraints(batch_size=8, schedules=PLAIN)
    evaluator, missing = Evaluator(found, here, constraints), []
    for size in sizes(constraints, here, 1, 6):
        family = next(families(constraints, size, UNIT_COSTS), None)
        if family is not None:
            missing.append(evaluator.excess_of(size, family).num_bytes)
            assert evaluator.least_excess(size) <= missing[-1]
    with pytest.raises(ConfigError, match=f"lacks {bytes_text(round(min(missing)))} on its full"):
        find_plans([found], here, constraints)


def test_constraints_are_kept() -> None:
    constraints = Constraints(batch_size=8, num_ranks=3, num_replicas=1, num_microbatches=4)
    chosen = plan(chain([1.0] * 6), cluster(4), 8, constraints=constraints)
    assert chosen.placement.num_places == 3
    assert (chosen.num_microbatches, chosen.batch_size) == (4, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    (
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_replicas": 9}, "batch_size=8 for num_replicas=9"),
        ({"schedules": ("fastest",)}, "no schedule 'fastest'"),
        ({"memory_share": 2.0}, "memory_share=2.0"),
        ({"num_ranks": 99}, "no plan is possible"),
        ({"num_ranks": 5}, "no plan is possible"),
    ),
)
def test_constraints_that_cannot_be_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        constraints = Constraints(**{"batch_size": 8, **change})  # type: ignore[arg-type]
        find_plans([chain([1.0] * 6)], cluster(4), constraints)


def test_profiles_of_different_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer 4, '4' .* is in the"):
        plan([chain([1.0] * 5), chain([1.0] * 4)], cluster(2), 8)


def test_every_number_of_ranks_replicas_and_micro_batches_is_looked_at_on_few_devices() -> None:
    found = set(sizes(Constraints(batch_size=8), cluster(4), 1, 6))
    assert {s.num_ranks for s in found} == {1, 2, 3, 4}
    assert all(s.num_ranks * s.num_replicas <= 4 for s in found)
    assert Size(1, 4, 1) in found and Size(4, 1, 8, 1) in found


def unlike(*kinds: str) -> Cluster:
    """Return a host with devices of unlike speed: of "slow" ones half that of "fast" ones."""
    here = cluster(len(kinds))
    (device,) = here.devices.values()
    slow = replace(
        device,
        name="slow",
        flops_per_s={dtype: rate / 2 for dtype, rate in device.flops_per_s.items()},
        bytes_per_s=device.bytes_per_s / 2,
    )
    host = replace(here.hosts[0], devices=kinds)
    return replace(here, devices={"fast": device, "slow": slow}, hosts=(host,))


def with_operators(model: Profile) -> Profile:
    """Return the same with the operators of its layers, so that other devices have a price."""
    (at,) = model.sizes
    parts = (Part.FORWARD, Part.INPUT, Part.WEIGHT)

    def counted(kind: LayerKind) -> LayerKind:
        assert kind.seconds is not None
        flops = round(kind.seconds.forward_s * 10**9)
        each = (Operator(name="gemm", part=part, flops=flops, num_bytes=0) for part in parts)
        return replace(kind, operators=tuple(each))

    return replace(model, sizes=(replace(at, kinds=tuple(map(counted, at.kinds))),))


@pytest.mark.parametrize(
    ("kinds", "places"),
    [
        (("slow", "slow", "fast", "fast"), (2, 3)),
        (("slow", "fast"), (1, 0)),
        (("fast", "slow"), None),
    ],
)
def test_ranks_are_on_the_devices_and_in_the_order_that_are_fastest(
    kinds: tuple[str, ...], places: tuple[int, ...] | None
) -> None:
    model = with_operators(chain([3.0, 1.0, 1.0, 1.0], weight_bytes=0))
    asked = Constraints(batch_size=8, num_ranks=2, num_replicas=1, stages_per_rank=(1,))
    found = plan(model, unlike(*kinds), 8, constraints=asked)
    assert found.placement.cluster_places == places
    if len(kinds) == 2:
        assert found.partition == (2, 2)
