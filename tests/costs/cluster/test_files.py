"""Clusters in TOML: what a file may say, what is wrong with it in one line, and the presets."""

import tomllib
from pathlib import Path

import pytest

from penstock.costs.cluster import Cluster, Device, Host, Link
from penstock.costs.cluster.files import device_preset, preset_names, preset_text
from penstock.errors import ConfigError, UnreadableError

GOOD = """
name = "mine"

[devices.a]
flops_per_s = { float32 = 1e12 }
bytes_per_s = 100_000_000_000
memory_bytes = 1073741824

[devices.b]
flops_per_s = { float32 = 3e12 }
bytes_per_s = 1e11
memory_bytes = 1073741824

[[hosts]]
name = "h"
devices = { a = 2, b = 1 }
port = "bus"
groups = [[0, 1], [2]]
uplink = "bus"
network = "net"

[[hosts]]
name = "g"
devices = ["b"]
network = "net"

[links.bus]
bytes_per_s = 8e9
duplex = false

[links.net]
bytes_per_s = 1e9
latency_s = 1e-5
"""


def test_a_file_says_kinds_one_by_one_or_by_their_counts() -> None:
    cluster = Cluster.from_toml(GOOD)
    assert [host.devices for host in cluster.hosts] == [("a", "a", "b"), ("b",)]
    assert cluster.devices["a"].name == "a"
    assert cluster.devices["b"].flops_per_s == {"float32": 3e12}
    assert cluster.links["bus"] == Link(bytes_per_s=8e9, duplex=False)


def test_what_is_written_reads_as_the_same(tmp_path: Path) -> None:
    cluster = Cluster.from_toml(GOOD)
    cluster.save(tmp_path / "c.toml", comment="one\n\ntwo")
    assert Cluster.load(tmp_path / "c.toml") == cluster
    assert Cluster.load(str(tmp_path / "c.toml")) == cluster
    text = (tmp_path / "c.toml").read_text()
    assert text.startswith("# one\n#\n# two\n")
    assert Cluster.from_toml(text).hosts == cluster.hosts


def test_kinds_in_turn_are_written_one_by_one() -> None:
    device = Device(name="x", flops_per_s={"float32": 1.0}, bytes_per_s=1.0, memory_bytes=1)
    mixed = Cluster(
        name="mixed",
        devices={"a": device, "b": device},
        hosts=(Host(name="h", devices=("a", "b", "a"), port="bus"),),
        links={"bus": Link(bytes_per_s=1.0)},
    )
    assert Cluster.from_toml(mixed.to_toml()) == mixed


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "mine"', "", "it lacks name"),
        ('name = "mine"', "name = ", "it is damaged, or no TOML: "),
        ('name = "mine"', 'name = "mine"\nhost = 1', "unknown key host; known are name, "),
        ('port = "bus"', 'prot = "bus"', r"unknown key hosts\[0\].prot; known are name, "),
        ('port = "bus"', "", r"hosts\[0\].port is missing, and the host has 3 devices"),
        ('port = "bus"', 'port = "bos"', r"hosts\[0\].port is 'bos', .* in links; there are bus"),
        ('port = "bus"', 'port = "bus"\nprocesses = "x"', r"hosts\[0\].processes is 'x'"),
        ('uplink = "bus"', 'uplink = "x"', r"hosts\[0\].uplink is 'x'"),
        ('uplink = "bus"', "", r"hosts\[0\].uplink is missing, and the host has 2 groups"),
        ("groups = [[0, 1], [2]]", "", r"hosts\[0\].uplink is 'bus', and the host has no groups"),
        ("[[0, 1], [2]]", "[[0, 1], [1, 2]]", r"hosts\[0\].groups has device 1 twice"),
        ("[[0, 1], [2]]", "[[0], [2]]", r"hosts\[0\].groups leaves out device 1"),
        ("[[0, 1], [2]]", "[[0, 1], [3]]", r"hosts\[0\].groups\[1\] names device 3; .* 0 to 2"),
        ("[[0, 1], [2]]", "[[0, 1, 2], []]", r"hosts\[0\].groups\[1\] is empty"),
        ('name = "g"', 'name = "h"', r"hosts\[1\].name is 'h', and so is hosts\[0\].name"),
        (
            'devices = ["b"]\nnetwork = "net"',
            'devices = ["b"]',
            r"hosts\[1\].network is missing, and the cluster has 2 hosts",
        ),
        ('network = "net"', 'network = "web"', r"hosts\[0\].network is 'web'"),
        ('network = "net"', 'network = "net"\ncards = 2', r"hosts\[0\].cards is 2, .* 3 devices"),
        ('network = "net"', 'network = "net"\ncards = 0', r"hosts\[0\].cards is 0"),
        ('network = "net"', 'network = "net"\ncount = -1', r"hosts\[0\].count is -1"),
        ('network = "net"', 'network = "net"\ncount = 1000000', "hosts have 3,000,001 devices"),
        ('network = "net"', 'network = "net"\nmemory_bytes = 0', r"hosts\[0\].memory_bytes is 0"),
        ('network = "net"', 'network = "net"\nbusy_speed = [1, 1.5]', r"\[0\].busy_speed\[1\]"),
        ('network = "net"', 'network = "net"\nbusy_speed = [0]', r"\[0\].busy_speed\[0\] is 0"),
        ('network = "net"', 'network = "net"\nprocess_bytes = 9', r"\[0\].process_bytes is read"),
        ("a = 2, b = 1", "", r"hosts\[0\].devices is empty"),
        ("a = 2, b = 1", "a = 2, c = 1", r"hosts\[0\].devices\[2\] is 'c', .* in devices"),
        ("a = 2, b = 1", "a = 0", r"hosts\[0\].devices.a must be a whole number from 1 to"),
        ("a = 2, b = 1", "a = 1e9", r"hosts\[0\].devices.a must be a whole number"),
        ("a = 2, b = 1", "a = 99999999999", r"hosts\[0\].devices.a must be .* is 99999999999"),
        ("{ a = 2, b = 1 }", '"a"', r"hosts\[0\].devices must be a list, and is \"a\""),
        ("bytes_per_s = 1e9", "", "it lacks links.net.bytes_per_s"),
        ("bytes_per_s = 1e9", "bytes_per_s = 0", "links.net.bytes_per_s is 0.0; .* above 0"),
        ("bytes_per_s = 1e9", "bytes_per_s = -1", "links.net.bytes_per_s is -1.0"),
        ("bytes_per_s = 1e9", "bytes_per_s = inf", "links.net.bytes_per_s must be a finite"),
        ("bytes_per_s = 1e9", 'bytes_per_s = "1 GB"', "links.net.bytes_per_s must be a finite"),
        ("bytes_per_s = 1e9", "bytes_per_s = 2026-01-01", "links.net.bytes_per_s must be"),
        ("= 8e9", "= [8e9, 9e9]", "links.bus.bytes_per_s must be a finite number, and is .*8"),
        ("latency_s = 1e-5", "latency_s = -1e-5", "links.net.latency_s is -1e-05; .* from 0"),
        ("latency_s = 1e-5", "overhead_s = -1", "links.net.overhead_s is -1.0"),
        ("latency_s = 1e-5", "copy_bytes_per_s = 0", "links.net.copy_bytes_per_s is 0.0"),
        ("latency_s = 1e-5", "collective_bytes_per_s = 0", "collective_bytes_per_s is 0.0"),
        ("latency_s = 1e-5", "sum_bytes_per_s = -1", "links.net.sum_bytes_per_s is -1.0"),
        (
            "latency_s = 1e-5",
            'nccl = "tcp"',
            'links.net.nccl must be "nvlink" or',
        ),
        ("duplex = false", "duplex = 0", "links.bus.duplex must be true or false, and is 0"),
        ("memory_bytes = 1073741824", "", "it lacks devices.a.memory_bytes"),
        ("memory_bytes = 1073741824", "memory_bytes = 0", "devices.a: memory_bytes of device 'a'"),
        ("memory_bytes = 1073741824", "memory = 1", "unknown key devices.a.memory; known are"),
        ("{ float32 = 1e12 }", "{ float32 = -1 }", "devices.a: flops_per_s.float32 of device 'a'"),
        ("{ float32 = 1e12 }", "{}", "devices.a: device 'a' has no flops_per_s"),
        ("[devices.a]", '[devices.a]\npreset = "x1"', "devices.a.preset is 'x1', .* presets are"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_field_and_file(tmp_path, old, new, words) -> None:
    assert old in GOOD
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=words) as caught:
        Cluster.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it lacks name"),
        ('name = "x"\ndevices = 3\nhosts = []', "devices must be an object, and is 3"),
        ('name = "x"\nhosts = 3\n[devices]', "hosts must be a list, and is 3"),
        ('name = "x"\nhosts = [3]\n[devices]', r"hosts\[0\] must be an object, and is 3"),
        ('name = "x"\nhosts = []\n[devices]', "devices is empty"),
        ('name = "x"\nhosts = []\n[devices]\na = 1', "devices.a must be an object, and is 1"),
        ("[" * 10_000, "it is damaged, or no TOML"),
    ],
)
def test_what_is_no_cluster_at_all_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Cluster.from_toml(text)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path, words in (
        (tmp_path / "absent.toml", "no such file, and no such preset; presets are dgx-a100, "),
        (tmp_path, "it cannot be read: Is a directory"),
        (tmp_path / "binary", "it is not UTF-8 text"),
    ):
        with pytest.raises(UnreadableError, match=words) as caught:
            Cluster.load(path)
        assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("name", preset_names("devices"))
def test_the_name_of_a_device_is_a_host_of_one(name: str) -> None:
    cluster = Cluster.load(name)
    assert (len(cluster.places), cluster.name) == (1, f"a host of one {name}")
    assert cluster.device_of(0) == device_preset(name)


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_presets_load_and_reach_each_device_from_each(name: str) -> None:
    cluster = Cluster.load(name)
    places = range(len(cluster.places))
    routes = [cluster.route(a, b) for a in places for b in places if a != b]
    assert min(route.bytes_per_s for route in routes) >= 5e9
    assert min(len(route.lanes) for route in routes) >= 2
    assert Cluster.from_toml(cluster.to_toml()) == cluster


def test_there_are_presets_of_the_papers_machines() -> None:
    names = {"p3.16xlarge", "p100-pcie-8", "p40-pcie-4", "p40-pcie-8", "tpu-v2-8", "tpu-v3-8"}
    assert names | {"dgx-a100", "dgx-h100", "hgx-h200", "dgx-b200"} <= {*preset_names("clusters")}
    assert len(Cluster.load("p40-pcie-4").places) == 4


def test_a_preset_can_be_taken_several_times() -> None:
    pod = Cluster.load("16 x tpu-v3-8")
    assert len(pod.places) == 128
    assert [lane.what for lane in pod.route(0, 127).lanes] == [
        *("port", "network", "network", "port"),
    ]
    with pytest.raises(UnreadableError, match="tpu-v3: no such file, and no such preset"):
        Cluster.load("2 x tpu-v3")


def test_a_device_of_a_file_may_be_a_preset_with_some_fields_of_its_own() -> None:
    text = GOOD.replace(
        "[devices.a]\nflops_per_s = { float32 = 1e12 }",
        '[devices.a]\npreset = "v100-sxm2"\nflops_per_s = { float32 = 1e12 }',
    )
    mine, theirs = Cluster.from_toml(text).devices["a"], device_preset("v100-sxm2")
    assert mine.memory_bytes == 1073741824
    assert mine.flops_per_s == {**theirs.flops_per_s, "float32": 1e12}
    assert (mine.name, mine.tile, mine.units) == (theirs.name, theirs.tile, theirs.units)


@pytest.mark.parametrize("name", preset_names("clusters"))
def test_presets_say_where_their_figures_are_from(name: str) -> None:
    data = tomllib.loads(preset_text("clusters", name))
    assert data["name"] == name
    assert data["source"]
    assert all(link["source"] for link in data["links"].values())
