"""Seconds of collectives: the forms of NCCL, lanes that groups share, and measured rates."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.costs.cluster import Cluster, Link
from penstock.costs.cluster.collectives import Collective, collective_s
from penstock.costs.cluster.hosts import NcclLink
from penstock.errors import ConfigError
from tests.costs.cluster.clusters import LINKS, cluster_of, host
from tests.costs.cluster.collective_seconds import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    reduce_scatter_s,
)

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


@pytest.mark.parametrize(("cards", "others"), [(1, 4), (4, 4), (4, 1)])
def test_a_ring_over_hosts_crosses_each_border_over_the_cards_of_the_poorest_host(
    cards: int, others: int
) -> None:
    """All but an eighth of the bytes leave each host, in as many channels as it has cards."""
    rich = host(4, network="net", cards=cards)
    cluster, b = cluster_of(rich, host(4, name="g", network="net", cards=others)), 1e8
    latency_s = 6 * ALPHA_S + ALPHA_S + 1e-5 + 2 * 3e-6
    across_s = 7 / 8 * b / (min(cards, others) * 1e9)
    assert all_gather_s(cluster, range(8), b) == pytest.approx(latency_s + across_s)
    assert all_reduce_s(cluster, range(8), b) == pytest.approx(2 * (latency_s + across_s))


def test_groups_unlike_on_hosts_use_the_cards_they_have_on_the_poorest_one() -> None:
    cluster = cluster_of(host(4, network="net", count=3, cards=4))
    wide, narrow = ([*range(4), *range(4, 8)], [*range(4), 4, 5])
    parts_s = (all_gather_s(cluster, group, 1e9) for group in (wide, narrow))
    assert [*parts_s] == pytest.approx([7 / 8 / 4, 5 / 6 / 2], rel=1e-3)


@pytest.mark.parametrize("kind", Collective)
def test_groups_that_run_at_once_share_the_card_of_their_host(kind: Collective) -> None:
    cluster = cluster_of(host(8, network="net", count=2))
    groups = [[n, n + 8] for n in range(8)]
    one, all_s = (collective_s(cluster, some, kind, 1e8) for some in (groups[:1], groups))
    assert all_s / one == pytest.approx(8, rel=1e-2)
    alone = cluster_of(host(8, network="net", count=2, cards=8))
    assert collective_s(alone, groups, kind, 1e8) == pytest.approx(one)


def test_an_all_to_all_sends_what_its_pairs_across_hosts_need() -> None:
    cluster = cluster_of(host(4, network="net", count=2))
    assert all_to_all_s(cluster, range(8), 1e9) == pytest.approx(4 * 4 / 8, rel=1e-3)


@pytest.mark.parametrize(("n", "rate"), [(2, 8e9), (3, 16e9), (8, 20e9)])
def test_rings_have_a_rate_of_their_own_on_the_links_of_their_devices(n: int, rate: float) -> None:
    link = Link(bytes_per_s=8e9, collective_bytes_per_s=20e9)
    cluster = cluster_of(host(8), links={"bus": link})
    assert cluster.route(0, 1).bytes_per_s == 8e9
    assert all_gather_s(cluster, range(n), 1e9) == pytest.approx((n - 1) / n * 1e9 / rate)


@pytest.mark.parametrize("collective", ALL)
def test_a_collective_of_the_bytes_of_half_the_rate_has_it(
    collective: Callable[..., float],
) -> None:
    """It takes twice as long as without a ramp; fewer bytes take no less than half of that."""
    fast, slow = (
        cluster_of(host(4), links={"bus": Link(bytes_per_s=8e9, half_rate_bytes=half)})
        for half in (0.0, 1e8)
    )
    fast_s, slow_s, least_s = (
        collective(fast, range(4), 1e8),
        collective(slow, range(4), 1e8),
        collective(slow, range(4), 0.0),
    )
    assert [slow_s, least_s] == pytest.approx([2 * fast_s, fast_s])


def test_sums_in_a_switch_have_half_their_rate_at_those_bytes_and_few_bytes_have_no_ramp() -> None:
    links = {"bus": replace(SWITCH, half_rate_bytes=1e8)}
    cluster = cluster_of(host(8), links=links)
    assert all_reduce_s(cluster, range(8), 1e8) == pytest.approx(2 * (1 + 1 / 8) * 1e8 / 1e11)
    plain = cluster_of(host(8), links={"bus": SWITCH})
    few_s, plain_s = (all_reduce_s(own, range(8), 1e4) for own in (cluster, plain))
    assert few_s == plain_s


NVLINK = Link(bytes_per_s=1e11, nccl=NcclLink.NVLINK, latency_s=9.0)
SWITCH = Link(bytes_per_s=1e11, nccl=NcclLink.NVLINK, sum_bytes_per_s=1e11)
NETWORK = Link(bytes_per_s=1e10, nccl=NcclLink.NETWORK)


def test_the_protocol_of_a_ring_goes_by_the_size() -> None:
    """LL is the fastest for few bytes, then LL128, then Simple, as NCCL's table has them."""
    cluster = cluster_of(host(4), links={"bus": NVLINK})
    for num_bytes, base_s, hop_s, share in (
        (1e3, 6.6e-6, 0.6e-6, 0.5),
        (3e6, 14.0e-6, 1.9e-6, 120 / 128),
        (1e9, 8.4e-6, 3.4e-6, 1.0),
    ):
        wanted_s = base_s + 6 * hop_s + 2 * 3 / 4 * num_bytes / 1e11 / share
        assert all_reduce_s(cluster, range(4), num_bytes) == pytest.approx(wanted_s)


def test_a_tree_over_two_hosts_sends_each_byte_once_and_of_more_hosts_is_short() -> None:
    links = {"bus": NVLINK, "net": NETWORK}
    two, many = (cluster_of(host(4, network="net", count=n), links=links) for n in (2, 64))
    assert all_reduce_s(two, range(8), 1e9) == pytest.approx(1e9 / 1e10 / 0.92, rel=1e-2)
    assert all_gather_s(two, range(8), 1e9) == pytest.approx(7 / 8 * 1e9 / 1e10, rel=1e-2)
    hops_s = 2 * (3 * 0.6e-6 + 6 * 5.0e-6)
    assert all_reduce_s(many, range(256), 0) == pytest.approx(6.8e-6 + hops_s)
    ring_s = 192 * 0.6e-6 + 63 * 2.7e-6
    assert all_gather_s(many, range(256), 0) == pytest.approx(6.6e-6 + ring_s)


def test_switches_sum_for_all_reduces_of_five_devices_of_a_host() -> None:
    links = {"bus": SWITCH, "net": NETWORK}
    cluster = cluster_of(host(8, network="net", count=2), links=links)
    groups = (range(4), range(8), range(4, 12))
    bus = [_bus_rate(all_reduce_s(cluster, g, 1e11), len(g), 1e11) for g in groups]
    assert bus == pytest.approx([1e11, 2 * 7 / 9 * 1e11, 2e10 * 0.92 * 7 / 8], rel=1e-2)
    assert all_gather_s(cluster, range(8), 1e11) == pytest.approx(7 / 8, rel=1e-2)


MEASURED = {
    ("dgx-a100", 8): {64: 172, 256: 194, 1024: 229, 16384: 235},
    ("hgx-h200", 8): {64: 347, 256: 436, 1024: 464, 16384: 482},
    ("hgx-h200", 4): {8192: 363},
    ("hgx-h200", 5): {8192: 414},
    ("hgx-h200", 6): {8192: 436},
    ("hgx-h200", 7): {8192: 460},
    ("dgx-b200", 8): {64: 401, 256: 646, 1024: 723, 16384: 846},
    ("dgx-b200", 4): {8192: 673},
    ("dgx-b200", 5): {8192: 678},
    ("dgx-b200", 6): {8192: 778},
    ("dgx-b200", 7): {8192: 811},
    ("4 x p6-b200.48xlarge", 32): {64: 157, 256: 229, 1024: 362, 16384: 382},
}
"""GB/s of bus bandwidth of all-reduces by MiB (github.com/stas00/ml-engineering, network)."""


@pytest.mark.parametrize(("preset", "size"), MEASURED)
def test_measured_bus_rates_are_predicted_within_15_percent_above_16_mib(
    preset: str, size: int
) -> None:
    cluster = Cluster.load(preset)
    for mib, measured in MEASURED[preset, size].items():
        seconds = all_reduce_s(cluster, range(size), mib * 2**20)
        ratio = _bus_rate(seconds, size, mib * 2**20) / 1e9 / measured
        assert 0.85 < ratio < 1.15, mib


def test_gathers_and_scatters_are_measured_rings_without_a_switch() -> None:
    cluster = Cluster.load("hgx-h200")
    for collective, measured in ((all_gather_s, 361e9), (reduce_scatter_s, 363e9)):
        assert 7 / 8 * 2**34 / collective(cluster, range(8), 2**34) == pytest.approx(
            measured, rel=0.15
        )


@pytest.mark.parametrize("preset", ["2 x p3.16xlarge", "3 x dgx-h100", "2 x tpu-v2-8"])
def test_more_bytes_never_take_less(preset: str) -> None:
    cluster = Cluster.load(preset)
    for kind in Collective:
        groups = [[n, n + 8] for n in range(8)]
        seconds = [collective_s(cluster, groups, kind, 4.0**n) for n in range(18)]
        assert all(a < b for a, b in pairwise(seconds))


def _bus_rate(seconds: float, size: int, num_bytes: float) -> float:
    """Return the bandwidth that rings of `size` devices would need, as nccl-tests counts."""
    return 2 * (size - 1) / size * num_bytes / seconds


def test_one_device_of_each_host_is_a_ring_over_the_network() -> None:
    cluster = cluster_of(host(2, network="net", count=3))
    alpha_s = ALPHA_S + 1e-5 + 2 * 3e-6
    took_s = all_gather_s(cluster, [0, 2, 4], 3e6)
    assert took_s == pytest.approx(2 * (alpha_s + 1e6 / 1e9))
