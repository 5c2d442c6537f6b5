"""Routes between devices, what transfers share, and what a cluster is made of."""

import math

import pytest

from penstock.costs.cluster import Cluster, Device, Lane, Link
from penstock.errors import ConfigError
from tests.costs.cluster.clusters import DEVICE, LINKS, cluster_of, host


def lanes(cluster: Cluster, source: int, target: int) -> tuple[Lane, ...]:
    return cluster.route(source, target).lanes


def test_devices_are_numbered_host_by_host() -> None:
    other = Device(name="b", flops_per_s={"float32": 2e12}, bytes_per_s=1e11, memory_bytes=2**31)
    cluster = cluster_of(
        host(2, network="net", count=2),
        host(name="g", devices=("b", "a"), network="net"),
        devices={"a": DEVICE, "b": other},
    )
    found = [(place.host, place.host_name, place.number, place.kind) for place in cluster.places]
    assert found == [
        *[(0, "h-0", 0, "a"), (0, "h-0", 1, "a"), (1, "h-1", 0, "a"), (1, "h-1", 1, "a")],
        *[(2, "g", 0, "b"), (2, "g", 1, "a")],
    ]
    assert [cluster.device_of(n).name for n in range(6)] == list("aaaaba")
    assert [cluster.host_of(n).name for n in range(6)] == list("hhhhgg")


def test_a_device_reaches_itself_at_once() -> None:
    route = cluster_of(host()).route(1, 1)
    assert (route.lanes, route.latency_s, route.bytes_per_s) == ((), 0, math.inf)


def test_in_a_host_a_value_passes_both_ports_once() -> None:
    route = cluster_of(host()).route(0, 1)
    assert route.lanes == (Lane("port", (0, 0), "out"), Lane("port", (0, 1), "in"))
    assert (route.latency_s, route.bytes_per_s, route.overhead_s) == (1e-6, 8e9, 0)


def test_both_ways_share_no_lane_if_a_link_is_duplex_and_all_if_not() -> None:
    duplex, not_duplex = cluster_of(host()), cluster_of(host(port="half"))
    assert not {*lanes(duplex, 0, 1)} & {*lanes(duplex, 1, 0)}
    assert {*lanes(not_duplex, 0, 1)} == {*lanes(not_duplex, 1, 0)}
    assert {lane.direction for lane in lanes(not_duplex, 0, 1)} == {"both"}


def test_pairs_of_one_host_share_a_lane_only_where_they_share_a_device() -> None:
    cluster = cluster_of(host(4))
    assert not {*lanes(cluster, 0, 1)} & {*lanes(cluster, 2, 3)}
    assert {*lanes(cluster, 0, 1)} & {*lanes(cluster, 0, 2)} == {Lane("port", (0, 0), "out")}
    assert {*lanes(cluster, 0, 2)} & {*lanes(cluster, 1, 2)} == {Lane("port", (0, 2), "in")}


def test_only_devices_of_different_groups_use_the_uplinks_and_all_of_a_group_share_one() -> None:
    cluster = cluster_of(host(4, groups=((0, 1), (2, 3)), uplink="half"))
    uplinks = (Lane("uplink", (0, 0), "both"), Lane("uplink", (0, 1), "both"))
    assert [lane.what for lane in lanes(cluster, 2, 3)] == ["port", "port"]
    assert {*lanes(cluster, 0, 2)} & {*lanes(cluster, 1, 3)} == {*uplinks}
    route = cluster.route(0, 2)
    assert [lane.what for lane in route.lanes] == ["port", "uplink", "uplink", "port"]
    assert route.bytes_per_s == 4e9
    assert route.latency_s == pytest.approx(3e-6)
    assert [link.bytes_per_s for link in route.lane_links] == [8e9, 4e9, 4e9, 8e9]


def test_between_hosts_a_value_passes_the_network_card_of_each_device() -> None:
    cluster = cluster_of(host(4, network="net", cards=2, count=2))
    route = cluster.route(1, 6)
    assert route.lanes == (
        *(Lane("port", (0, 1), "out"), Lane("network", (0, 0), "out")),
        *(Lane("network", (1, 1), "in"), Lane("port", (1, 2), "in")),
    )
    assert route.bytes_per_s == 1e9
    assert route.latency_s == pytest.approx(1.1e-5)
    assert (route.overhead_s, route.blocks) == (3e-6, True)
    assert {*lanes(cluster, 0, 4)} & {*lanes(cluster, 1, 6)} == {Lane("network", (0, 0), "out")}
    assert not {*lanes(cluster, 0, 4)} & {*lanes(cluster, 3, 7)}


def test_hosts_may_differ_and_the_slower_end_decides() -> None:
    one = host(1, name="one", port=None, network="net")
    two = host(2, name="two", network="slow", port="half")
    slow = Link(bytes_per_s=1e8, latency_s=5e-5)
    cluster = cluster_of(one, two, links={**LINKS, "slow": slow})
    route = cluster.route(0, 2)
    assert [lane.what for lane in route.lanes] == ["network", "network"]
    assert (route.bytes_per_s, route.latency_s, route.blocks) == (1e8, 5e-5, False)


def test_processes_of_a_host_use_its_link_for_them() -> None:
    cluster = cluster_of(host(processes="half", network="net"), host(name="other", network="net"))
    apart = cluster.between_processes()
    assert cluster.route(0, 1).bytes_per_s == 8e9
    assert apart.route(0, 1).bytes_per_s == 4e9
    assert apart.route(2, 3).bytes_per_s == 8e9
    assert apart.between_processes() == apart


def test_ends_that_copy_a_message_are_busy_for_as_long() -> None:
    copied = Link(bytes_per_s=8e9, overhead_s=1e-5, copy_bytes_per_s=1e9)
    route = cluster_of(host(), links={"bus": copied}).route(0, 1)
    assert route.busy_s(1e6) == pytest.approx(1e-5 + 1e-3)
    others = cluster_of(host(), links={"bus": Link(bytes_per_s=8e9, overhead_s=1e-5)})
    assert others.route(0, 1).busy_s(1e6) == 1e-5


def test_a_cluster_is_taken_several_times() -> None:
    cluster = cluster_of(host(network="net")).times(3)
    assert len(cluster.places) == 6
    assert [lane.what for lane in lanes(cluster, 0, 5)] == ["port", "network", "network", "port"]
    with pytest.raises(ConfigError, match=r"hosts\[0\].network is missing, and the cluster has 2"):
        cluster_of(host()).times(2)
    with pytest.raises(ConfigError, match=r"hosts\[0\].count is 0"):
        cluster_of(host()).times(0)


@pytest.mark.parametrize("number", [-1, 2])
def test_a_device_that_is_not_there_is_refused(number: int) -> None:
    cluster = cluster_of(host())
    for asked in (cluster.device_of, cluster.host_of, lambda n: cluster.route(0, n)):
        with pytest.raises(ConfigError, match=f"has no device {number}; .* from 0 to 1"):
            asked(number)


def test_a_cluster_prints_as_tables() -> None:
    other = host(1, name="g", port=None, network="net", memory_bytes=2**34)
    made = host(4, network="net", cards=2, processes="half", busy_speed=(1.0, 0.75))
    text = str(cluster_of(made, other))
    assert "made up: 2 hosts, 5 devices" in text
    assert "4 x a" in text
    assert "bus (processes: half)" in text
    assert "hosts[0] while 1, 2, ... compute: 100.0%, 75.0%" in text
