"""A plan is predicted from what its layers cost and what it runs on."""

from dataclasses import replace

import pytest

from penstock.automatic.plan_model import simulate
from penstock.costs.records import LayerSeconds
from penstock.errors import ConfigError, PlanError
from penstock.planner.placement import Placement
from penstock.planner.plan import Plan
from penstock.planner.predict import Prediction
from penstock.schedules import Family, gpipe, interleaved_1f1b, one_f_one_b, zb_v
from penstock.trace import MemoryKind
from penstock.types import Recompute, Transport
from tests.profiles import chain, cluster

SECOND = chain([1.0] * 8)


def planned(
    family: Family,
    partition: tuple[int, ...],
    num_microbatches: int,
    num_replicas: int = 1,
    recompute: Recompute = Recompute.NEVER,
) -> Plan:
    return Plan(
        layers=SECOND.layers,
        partition=partition,
        schedule=family,
        num_microbatches=num_microbatches,
        recompute=(recompute,) * len(partition),
        placement=Placement.of(family.ranks(len(partition)), num_replicas),
        batch_size=num_microbatches * num_replicas,
    )


def test_a_step_takes_what_its_layers_do_and_its_messages() -> None:
    free = chain([1.0] * 8, weight_bytes=0)
    told = simulate(free, cluster(2, bytes_per_s=100, latency_s=0.5), planned(gpipe, (4, 4), 3))
    # 4 forwards of a micro-batch, 3 of them and 1 more; a message takes 1 + 0.5 seconds
    assert told.step_s == pytest.approx((3 + 1) * (4 + 8) + 2 * 1.5)


def test_a_step_has_the_samples_that_the_plan_was_made_for() -> None:
    at = SECOND.sizes[0]
    several = replace(SECOND, sizes=(at, replace(at, microbatch_size=2)))
    plan = planned(gpipe, (4, 4), 3)
    assert Prediction(plan, several, cluster(2)).microbatch_size == 1
    assert Prediction(plan, several, cluster(2), 6).microbatch_size == 2
    with pytest.raises(ConfigError, match="batch_size is not known"):
        simulate(several, cluster(2), replace(plan, batch_size=None))


@pytest.mark.parametrize("num_microbatches", (1, 4))
def test_a_measured_backward_adds_gradients_but_for_the_first_micro_batch(
    num_microbatches: int,
) -> None:
    heavy = chain([1.0] * 8, weight_bytes=10**8)
    costs = Prediction(planned(gpipe, (8,), num_microbatches), heavy, cluster(1)).costs
    sum_s = 3 * 10**8 / 1e9
    assert costs.backward_s == pytest.approx((8 * (2 - sum_s / num_microbatches),))
    assert costs.backward_weight_s == pytest.approx((8 * (1 - sum_s / num_microbatches),))


def test_replicas_add_their_gradients_up_at_the_end() -> None:
    one = simulate(SECOND, cluster(4), planned(gpipe, (4, 4), 3))
    two = simulate(SECOND, cluster(4), planned(gpipe, (4, 4), 3, 2))
    ring_s = 2 * (0.01 + 4 * 4000 / 2 / 1e6)
    assert two.step_s == pytest.approx(one.step_s + ring_s)


def test_running_statistics_move_once_a_step_in_small_operators() -> None:
    """36 operators of 0.1 s for each of two BatchNorms: 28 for all, and one a micro-batch."""
    with_norms = replace(
        SECOND, weights=(replace(SECOND.weights[0], num_norms=2), *SECOND.weights[1:])
    )
    here = cluster(1)
    here = replace(here, devices={n: replace(d, gap_s=0.1) for n, d in here.devices.items()})
    plan = planned(gpipe, (8,), 8)
    plain, moving = (simulate(each, here, plan).step_s for each in (SECOND, with_norms))
    assert moving == pytest.approx(plain + 2 * 36 * 0.1)
    told = Prediction(plan, with_norms, here)
    assert told.quick_step_s == pytest.approx(told.step_s)


def test_ranks_beyond_the_cores_of_a_host_share_them() -> None:
    free = chain([1.0] * 8, weight_bytes=0)
    plan = planned(gpipe, (2, 2, 2, 2), 12)
    alone = simulate(free, cluster(4, busy_speed=(1.0, 1.0, 1.0, 1.0)), plan).step_s
    shared = simulate(free, cluster(2, busy_speed=(1.0, 1.0)), plan).step_s
    assert alone == pytest.approx(15 * 6, abs=0.2)
    assert 12 * 4 * 6 / 2 <= shared < alone * 2


def test_layers_that_were_measured_on_busy_cores_say_themselves_how_slow_these_are() -> None:
    def busy(seconds: LayerSeconds | None) -> LayerSeconds:
        assert seconds is not None
        return replace(
            seconds, forward_s=1.25 * seconds.forward_s, backward_s=1.25 * seconds.backward_s
        )

    at = SECOND.sizes[0]
    kinds = tuple(replace(kind, busy_seconds=busy(kind.seconds)) for kind in at.kinds)
    measured = replace(SECOND, sizes=(replace(at, kinds=kinds),))
    here = cluster(2, busy_speed=(1.0, 0.6))
    plan = planned(gpipe, (4, 4), 1)
    (pool,) = Prediction(plan, measured, here).sharing.pools
    assert pool.speeds == pytest.approx((1.0, 0.8))
    (pool,) = Prediction(plan, SECOND, here).sharing.pools
    assert pool.speeds == pytest.approx((1.0, 0.6))
    (pool,) = Prediction(plan, measured, cluster(2, busy_speed=(1.0, 1.0))).sharing.pools
    assert pool.speeds == pytest.approx((1.0, 0.8))  # it is Python's lock alone
    crowded = Prediction(plan, measured, cluster(4, busy_speed=(1.0, 0.6)))
    assert crowded.sharing.pools[0].speeds == pytest.approx((1.0, 0.8))  # 4 places on 2 cores
    between = replace(plan, transport=Transport.TORCH_DISTRIBUTED)
    for known, expected in ((0.6, 0.8), (0.9, 0.9)):  # these do not wait for Python's lock
        (pool,) = Prediction(between, measured, cluster(2, busy_speed=(1.0, known))).sharing.pools
        assert pool.speeds == pytest.approx((1.0, expected))


def test_replicas_slow_each_other_down_on_the_same_host() -> None:
    free = chain([1.0] * 8, weight_bytes=0)
    slow = cluster(4, busy_speed=(1.0, 0.5))
    one = simulate(free, slow, planned(gpipe, (8,), 3)).step_s
    two = simulate(free, slow, planned(gpipe, (8,), 3, 2)).step_s
    assert two == pytest.approx(2 * one)


def test_shards_of_a_stage_slow_each_other_down_on_the_same_host() -> None:
    """Two stages of two shards: a stage has two processes on two cores, both have four."""
    shards = Placement.of(range(2), num_shards=2)
    plan = replace(planned(gpipe, (4, 4), 3), placement=shards, sharding="data")
    told = Prediction(plan, SECOND, cluster(4, busy_speed=(1.0, 0.9)))
    (pool,) = told.sharing.pools
    assert pool.ranks == (0, 1)
    assert pool.speeds == pytest.approx((0.9, 0.45))


@pytest.mark.parametrize("num_replicas", (1, 2))
@pytest.mark.parametrize("recompute", (Recompute.STAGE, Recompute.NEVER))
@pytest.mark.parametrize("family", (gpipe, one_f_one_b, zb_v(), interleaved_1f1b(2)))
def test_the_quick_way_finds_the_same_step_to_the_last_digit(
    family: Family, recompute: Recompute, num_replicas: int
) -> None:
    uneven = chain([0.1 * n + 0.7 for n in range(8)])
    plan = planned(family, (1, 3, 2, 2), 5, num_replicas, recompute)
    for here in (cluster(8), cluster(4, busy_speed=(1.0, 0.9, 0.6)), cluster(8, num_hosts=2)):
        found = Prediction(plan, uneven, here)
        assert found.quick_step_s == found.step_s


def test_memory_is_weights_and_what_micro_batches_keep() -> None:
    told = simulate(SECOND, cluster(2), planned(one_f_one_b, (4, 4), 3))
    # stage 0 keeps two micro-batches, stage 1 one: inner bytes of four layers and the input
    assert told.peak_bytes() == {0: 2 * (4 * 1000 + 100), 1: 4 * 1000 + 100}
    of_weights = {s.kept_bytes for s in told.memory if s.kind is MemoryKind.WEIGHTS}
    assert of_weights == {4 * 4000}


def test_a_plan_of_another_model_is_refused_by_its_first_layer() -> None:
    other = chain([1.0] * 9)
    with pytest.raises(PlanError, match=r"layer 8, '8' .* is in the model only"):
        simulate(other, cluster(2), planned(gpipe, (4, 4), 3))


def test_too_few_devices_and_samples_are_refused() -> None:
    plan = planned(gpipe, (4, 4), 3)
    with pytest.raises(PlanError, match="for 2 ranks, and the cluster here has 1 device;"):
        simulate(SECOND, cluster(1), plan)
    with pytest.raises(ConfigError, match="batch_size=2 for 1 replica of 3 micro-batches"):
        simulate(SECOND, cluster(2), plan, batch_size=2)


def test_processes_post_receives_and_use_the_hosts_other_link() -> None:
    between = replace(planned(gpipe, (4, 4), 3), transport=Transport.TORCH_DISTRIBUTED)
    here = cluster(2)
    (host,) = here.hosts
    slow = replace(here.links["link"], latency_s=7.0)
    here = replace(
        here, hosts=(replace(host, processes="slow"),), links={**here.links, "slow": slow}
    )
    threads = simulate(SECOND, here, planned(gpipe, (4, 4), 3)).step_s
    assert simulate(SECOND, here, between).step_s == pytest.approx(threads + 2 * (7.0 - 0.01))


def test_processes_update_their_weights_at_once_and_threads_one_stage_after_the_other() -> None:
    threads = Prediction(planned(gpipe, (5, 3), 3), SECOND, cluster(2))
    apart = replace(threads.plan, transport=Transport.TORCH_DISTRIBUTED)
    processes = Prediction(apart, SECOND, cluster(2))
    assert threads.optimizer_s == processes.optimizer_s
    assert threads.update_s == pytest.approx(sum(threads.optimizer_s))
    assert processes.update_s == processes.optimizer_s[0] > processes.optimizer_s[1]
