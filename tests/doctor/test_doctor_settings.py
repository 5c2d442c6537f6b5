"""Every wrong setting is found, and explained in one line: what, why, and what to change."""

from dataclasses import replace

import pytest

from penstock.doctor.facts import Host, this_host
from penstock.doctor.finding import Finding, Severity, merged
from penstock.doctor.settings import (
    Place,
    check_gloo,
    check_place,
    check_start,
    check_threads,
    gloo_address,
    read_place,
)

NAMES = {"here": "10.0.0.1", "there": "10.0.0.2", "localhost": "127.0.0.1"}
HOST = Host(
    name="here",
    num_cores=8,
    quota_cores=None,
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": None},
    resolve=lambda name: (NAMES[name],) if name in NAMES else (),
    is_own=lambda address: address in ("10.0.0.1", "127.0.0.1", "127.0.1.1"),
    can_listen=lambda port: port != 29500,
)
PLACE = Place(rank=0, world_size=4, address="here", port=29501, keeps_store=True)
GOOD = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "29501"}
ERROR, WARNING = Severity.ERROR, Severity.WARNING


def said(findings: list[Finding], severity: Severity, *words: str) -> None:
    """See that there is one finding, and that its one line has the words."""
    (found,) = findings
    line = str(found)
    assert found.severity is severity
    assert found.what and found.why and found.change and "\n" not in line
    for word in words:
        assert word in line, f"{word!r} is not in: {line}"


def test_a_job_that_torchrun_starts_is_fine() -> None:
    for environment in ({}, {"WORLD_SIZE": "1", "RANK": "0"}, GOOD):
        assert check_start(environment) == []
    assert list(check_place(PLACE, GOOD, HOST)) == []
    assert list(check_gloo(GOOD, HOST)) == []
    assert list(check_threads({"OMP_NUM_THREADS": "2"}, HOST)) == []
    assert read_place({}) is None
    assert read_place(GOOD) == PLACE
    by_torchrun = read_place({**GOOD, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert by_torchrun == replace(PLACE, keeps_store=False)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["", "x", "1.5", "-1"])
def test_what_is_no_number_is_named(name: str, value: str) -> None:
    said(check_start({**GOOD, name: value}), ERROR, f"{name}={value}", "whole number", "torchrun")


@pytest.mark.parametrize("absent", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_settings_that_are_there_in_part_are_named(absent: str) -> None:
    environment = {name: value for name, value in GOOD.items() if name != absent}
    said(check_start(environment), ERROR, "WORLD_SIZE", f"but {absent} is not", "torchrun")


def test_a_rank_without_a_world_would_train_alone() -> None:
    said(check_start({"RANK": "1"}), ERROR, "RANK set", "WORLD_SIZE", "trains alone")
    said(check_start({"MASTER_ADDR": "here"}), WARNING, "MASTER_ADDR set", "runs alone")


def test_a_rank_beyond_the_world_and_a_port_beyond_the_last_are_named() -> None:
    said(
        check_start({**GOOD, "RANK": "4"}), ERROR, "RANK=4 with WORLD_SIZE=4", "the last one is 3"
    )
    said(check_start({**GOOD, "MASTER_PORT": "65536"}), ERROR, "MASTER_PORT=65536", "65535")


def test_several_mistakes_are_all_said() -> None:
    assert len(check_start({"RANK": "x", "WORLD_SIZE": "0", "MASTER_PORT": "y"})) == 3


def test_a_master_without_address_is_named() -> None:
    nowhere = replace(PLACE, address="nowhere")
    said(list(check_place(nowhere, {}, HOST)), ERROR, "MASTER_ADDR=nowhere", "/etc/hosts")


def test_a_master_at_127_0_0_1_is_for_one_host_only() -> None:
    local = replace(PLACE, address="localhost")
    assert list(check_place(local, {**GOOD, "LOCAL_WORLD_SIZE": "4"}, HOST)) == []
    found = list(check_place(local, {**GOOD, "LOCAL_WORLD_SIZE": "2"}, HOST))
    said(found, ERROR, "MASTER_ADDR=localhost", "2 of 4 processes", "rank 0 on itself")


def test_a_master_that_is_another_host_is_named_by_rank_0_only() -> None:
    elsewhere = replace(PLACE, address="there")
    said(list(check_place(elsewhere, {}, HOST)), WARNING, "MASTER_ADDR=there", "10.0.0.2")
    assert list(check_place(replace(elsewhere, rank=1, keeps_store=False), {}, HOST)) == []


def test_a_port_that_is_taken_is_named_unless_torchrun_has_it() -> None:
    taken = replace(PLACE, port=29500)
    said(list(check_place(taken, {}, HOST)), ERROR, "MASTER_PORT=29500", "a second process")
    assert list(check_place(replace(taken, keeps_store=False), {}, HOST)) == []


def test_an_interface_that_is_not_there_is_named_beside_those_that_are() -> None:
    found = list(check_gloo({"GLOO_SOCKET_IFNAME": "eth7"}, HOST))
    said(found, ERROR, "GLOO_SOCKET_IFNAME=eth7", "'eth7'", "eth0 (10.0.0.1)", "ib0")
    found = list(check_gloo({"GLOO_SOCKET_IFNAME": "eth0,ib1"}, HOST))
    said(found, ERROR, "GLOO_SOCKET_IFNAME=eth0,ib1", "'ib1'")
    found = list(check_gloo({"GLOO_SOCKET_IFNAME": "ib0"}, HOST))
    said(found, WARNING, "'ib0' has no IPv4 address")
    assert list(check_gloo({"GLOO_SOCKET_IFNAME": "eth0"}, HOST)) == []


@pytest.mark.parametrize(("name", "word"), [("nowhere", "no address"), ("there", "10.0.0.2")])
def test_a_machine_whose_name_is_not_its_own_is_named(name: str, word: str) -> None:
    host = replace(HOST, name=name)
    said(list(check_gloo({}, host)), WARNING, repr(name), word, "GLOO_SOCKET_IFNAME", "127.0.0.1")
    assert list(check_gloo({"GLOO_SOCKET_IFNAME": "eth0"}, host)) == []


def test_a_machine_whose_name_means_127_0_1_1_is_an_error_between_hosts() -> None:
    host = replace(HOST, name="local", resolve=lambda _: ("127.0.1.1",))
    job = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    found = list(check_gloo(job, host))
    said(found, ERROR, "gloo on local would listen at 127.0.1.1", "eth0 (10.0.0.1)", "/etc/hosts")
    assert list(check_gloo({**job, "LOCAL_WORLD_SIZE": "4"}, host)) == []
    assert list(check_gloo({**job, "GLOO_SOCKET_IFNAME": "eth0"}, host)) == []


def test_where_gloo_listens_is_predicted() -> None:
    assert gloo_address({}, HOST) == "10.0.0.1"
    assert gloo_address({"GLOO_SOCKET_IFNAME": "lo"}, HOST) == "127.0.0.1"
    assert gloo_address({}, replace(HOST, name="there")) == "127.0.0.1"


def test_threads_that_are_no_number_and_a_quota_below_the_cores_are_named() -> None:
    for value in ("", "many", "0"):
        found = list(check_threads({"OMP_NUM_THREADS": value}, HOST))
        said(found, WARNING, f"OMP_NUM_THREADS={value}", "there are 8")
    found = list(check_threads({}, replace(HOST, quota_cores=2.5)))
    said(found, WARNING, "a quota of 2.5 cores", "8 are visible", "use 2,")


def test_this_machine_can_be_described() -> None:
    host = this_host()
    assert host.num_cores >= 1
    assert host.interfaces["lo"] == "127.0.0.1"
    assert host.is_own("127.0.0.1")
    assert not host.is_own("192.0.2.123")  # an address for documents
    assert host.resolve("127.0.0.1") == ("127.0.0.1",)
    assert host.resolve("no.such.name.invalid") == ()


def test_what_ranks_say_alike_is_said_once() -> None:
    (finding,) = check_start({**GOOD, "RANK": "x"})
    other = replace(finding, severity=WARNING)
    by_rank = [replace(f, ranks=(r,)) for f in (other, finding) for r in range(3)]
    first, second = merged(by_rank[:-1])
    assert (first.severity, first.ranks) == (ERROR, (0, 1))
    assert (second.severity, second.ranks) == (WARNING, (0, 1, 2))
    assert str(second).startswith("ranks 0 to 2: RANK=x")
