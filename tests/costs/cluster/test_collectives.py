"""What combining values over a group takes: the forms of the literature, and shared lanes."""

from collections.abc import Callable

import pytest

from penstock.costs.cluster import Link
from penstock.costs.cluster.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
)
from penstock.errors import ConfigError
from tests.costs.cluster.clusters import LINKS, cluster_of, host

ALPHA_S, BETA = 1e-6, 8e9
ALL = (all_reduce_s, all_gather_s, reduce_scatter_s, all_to_all_s)


@pytest.mark.parametrize("n", [2, 4, 7])
def test_in_one_host_all_is_as_the_alpha_beta_forms_say(n: int) -> None:
    cluster, group, b = cluster_of(host(8)), range(n), 1e6
    part_s = (n - 1) / n * b / BETA
    assert all_reduce_s(cluster, group, b) == pytest.approx(2 * ((n - 1) * ALPHA_S + part_s))
    assert all_gather_s(cluster, group, b) == pytest.approx((n - 1) * ALPHA_S + part_s)
    assert reduce_scatter_s(cluster, group, b) == pytest.approx((n - 1) * ALPHA_S + part_s)
    assert all_to_all_s(cluster, group, b) == pytest.approx((n - 1) * ALPHA_S + part_s)


@pytest.mark.parametrize("collective", ALL)
def test_one_device_has_nothing_to_wait_for(collective: Callable[..., float]) -> None:
    assert collective(cluster_of(host(2)), [1], 1e9) == 0


@pytest.mark.parametrize("collective", ALL)
@pytest.mark.parametrize("n", [2, 4])
def test_each_takes_once_what_it_takes_to_begin(collective: Callable[..., float], n: int) -> None:
    plain, slow = (
        collective(cluster_of(host(4), links={"bus": link}), range(n), 1e6)
        for link in (Link(bytes_per_s=8e9), Link(bytes_per_s=8e9, collective_s=3e-3))
    )
    assert slow - plain == pytest.approx(3e-3)


@pytest.mark.parametrize("collective", ALL)
@pytest.mark.parametrize("group", [[], [0, 0], [0, 9]])
def test_a_group_that_cannot_be_is_refused(collective, group) -> None:
    with pytest.raises(ConfigError):
        collective(cluster_of(host(2)), group, 1.0)


def test_a_link_that_is_not_duplex_carries_half_as_much_in_a_ring() -> None:
    duplex = {**LINKS, "half": Link(bytes_per_s=4e9, latency_s=2e-6)}
    both = (cluster_of(host(4, port="half")), cluster_of(host(4, port="half"), links=duplex))
    one, two = (all_gather_s(cluster, range(4), 4e6) - 3 * 2e-6 for cluster in both)
    assert one == pytest.approx(2 * two)


def test_a_group_over_hosts_talks_within_each_first_and_shares_its_card() -> None:
    cluster, b, n = cluster_of(host(4, network="net", count=2)), 1e6, 4
    net_alpha_s = ALPHA_S + 1e-5 + 2 * 3e-6
    within_s = (n - 1) * (ALPHA_S + b / n / BETA)
    # four pairs, one for each quarter of the value, share a card of 1 GB/s
    across_s = net_alpha_s + b / n / 2 / (1e9 / 4)
    assert all_gather_s(cluster, range(8), b) == pytest.approx(within_s + across_s)
    assert all_reduce_s(cluster, range(8), b) == pytest.approx(2 * (within_s + across_s))


def test_cards_of_their_own_make_a_group_over_hosts_faster() -> None:
    shared, own = (
        all_reduce_s(cluster_of(host(4, network="net", count=2, cards=cards)), range(8), 1e8)
        for cards in (1, 4)
    )
    assert 2 < shared / own < 4


def test_one_device_of_each_host_is_a_ring_over_the_network() -> None:
    cluster = cluster_of(host(2, network="net", count=3))
    alpha_s = ALPHA_S + 1e-5 + 2 * 3e-6
    took_s = all_gather_s(cluster, [0, 2, 4], 3e6)
    assert took_s == pytest.approx(2 * (alpha_s + 1e6 / 1e9))
