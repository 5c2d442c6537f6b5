"""What a process has in memory is added up of what it has anyway and what its ranks hold."""

from dataclasses import replace

import pytest

from penstock.costs.cluster import Cluster
from penstock.planner.placement import Placement
from penstock.planner.plan import Plan
from penstock.planner.predict import Foretold
from penstock.schedules import gpipe
from penstock.types import Recompute, Transport
from tests.profiles import chain, cluster

BASE = 10**6
CHAIN = chain([1.0] * 8, inner_bytes=1000, weight_bytes=4000)
WEIGHTS = GRADIENTS = 8 * 4000
OPTIMIZER = 2 * WEIGHTS
INNER = 8 * 1000


def known(num_devices: int) -> Cluster:
    found = cluster(num_devices)
    return replace(found, hosts=(replace(found.hosts[0], process_bytes=BASE),))


def foretold(
    partition: tuple[int, ...], num_microbatches: int, transport: Transport = Transport.THREADS
) -> Foretold:
    plan = Plan(
        layers=CHAIN.layers,
        partition=partition,
        schedule=gpipe,
        num_microbatches=num_microbatches,
        recompute=(Recompute.NEVER,) * len(partition),
        placement=Placement.of(range(len(partition))),
        transport=transport,
        batch_size=num_microbatches,
    )
    return Foretold(plan, CHAIN, known(len(partition)))


@pytest.mark.parametrize("num_microbatches", (1, 3))
def test_a_process_holds_itself_its_batch_its_weights_and_what_waits_for_backwards(
    num_microbatches: int,
) -> None:
    told = foretold((8,), num_microbatches)
    step = WEIGHTS + GRADIENTS + num_microbatches * (100 + INNER)
    assert told.process_bytes(with_optimizer=False) == (BASE + step,)
    assert told.process_bytes() == (BASE + step + OPTIMIZER,)


def test_ranks_of_one_process_add_up_at_each_moment() -> None:
    """When stage 0 begins its backward, stage 1 has its gradients, and no activations any more;
    the gradient from there is just being taken in.
    """
    held = WEIGHTS + GRADIENTS + INNER // 2 + 100
    assert foretold((4, 4), 1).process_bytes(with_optimizer=False) == (BASE + 100 + held,)


def test_each_process_holds_what_its_stages_do() -> None:
    """The first one reads the batch; the last one keeps what came instead."""
    own = (WEIGHTS + GRADIENTS + INNER) // 2
    expected = (BASE + 100 + own + 100, BASE + own + 100)
    assert (
        foretold((4, 4), 1, Transport.TORCH_DISTRIBUTED).process_bytes(with_optimizer=False)
        == expected
    )


def test_nothing_is_said_of_accelerators_and_of_what_nobody_has_measured() -> None:
    told = foretold((8,), 1)
    assert replace(told, cluster=cluster(1), shared=None).process_bytes() is None
    gpus = {name: replace(x, torch_type="cuda") for name, x in told.cluster.devices.items()}
    on_gpus = replace(told.cluster, devices=gpus)
    assert replace(told, cluster=on_gpus, shared=None).process_bytes() is None
