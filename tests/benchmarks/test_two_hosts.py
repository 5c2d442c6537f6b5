"""Two hosts on one machine: the arithmetic of their shares, and that they are always removed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.two_hosts import main
from benchmarks.two_hosts.hosts import INTERFACE, TwoHosts, two_hosts, why_not
from benchmarks.two_hosts.shares import (
    Computed,
    costs_of,
    link_as_ranks,
    predicted_in_turn_s,
    predicted_s,
    shares,
)
from penstock.schedules import eager_1f1b, gpipe, one_f_one_b, parse
from penstock.schedules.ir import Schedule
from penstock.schedules.lower import Lowering, lower
from penstock.schedules.transfers import chain_transfers

ROOT = Path(__file__).parents[2]
NO_HOSTS = why_not()
needs_hosts = pytest.mark.skipif(NO_HOSTS is not None, reason=NO_HOSTS or "")


def lowered(family, num_microbatches: int) -> Schedule:
    """Lower a schedule of two stages as processes run it."""
    how = Lowering(family=family, ranks=family.ranks(2), transfers=chain_transfers(2), posts=True)
    return lower(how, num_microbatches)


EQUAL = (Computed(4.0, 0.0, 8.0), Computed(4.0, 0.0, 8.0))
"""Of four micro-batches: a forward takes 1, a backward 2."""


@pytest.mark.parametrize("function", (gpipe, one_f_one_b, eager_1f1b))
def test_without_communication_the_bubble_is_the_ideal_one(function) -> None:
    schedule = lowered(function, 4)
    found = shares(schedule, EQUAL, 15.0)  # (M + K - 1) * (1 + 2)
    assert found.compute == pytest.approx(4 / 5)
    assert found.bubble == pytest.approx(1 / 5)
    assert found.communication == pytest.approx(0.0)


def test_what_a_step_takes_longer_is_communication_and_shares_add_up_to_one() -> None:
    uneven = (Computed(4.0, 0.0, 8.0), Computed(2.0, 1.0, 5.0))
    found = shares(lowered(gpipe, 4), uneven, 24.0)
    assert found.compute == pytest.approx(10 / 24)
    assert found.communication > 0.3
    assert found.compute + found.communication + found.bubble == pytest.approx(1.0)


def test_costs_are_seconds_of_one_instruction() -> None:
    text = "rank 0 | 0f0 0f1 0R0 0B0 0R1 0B1\nrank 1 | 1F0 1B0 1F1 1B1"
    computed = (Computed(4.0, 3.0, 8.0), Computed(2.0, 0.0, 5.0))
    costs = costs_of(parse(text), computed)
    assert costs.forward_s == (2.0, 1.0)
    assert costs.recompute_s == (1.5, 0.0)
    assert costs.backward_s == (4.0, 2.5)


def test_the_link_becomes_two_ranks_that_carry_messages() -> None:
    schedule = parse("rank 0 | 0F0 0F0>1 0B0<1 0B0\nrank 1 | 1F0<0 1F0 1B0 1B0>0")
    expected = parse(
        "rank 0 | 0F0 0F0>2 0B0<3 0B0\n"
        "rank 1 | 1F0<2 1F0 1B0 1B0>3\n"
        "rank 2 | 2F0<0 2F0 2F0>1\n"
        "rank 3 | 3B0<1 3B0 3B0>0"
    )
    assert link_as_ranks(schedule) == expected


@pytest.mark.parametrize("function", (gpipe, one_f_one_b, eager_1f1b))
def test_a_link_that_takes_no_time_changes_nothing(function) -> None:
    schedule = lowered(function, 4)
    assert predicted_s(schedule, EQUAL, 0.0, 0.0) == pytest.approx(15.0)
    assert predicted_in_turn_s(schedule, EQUAL, 0.0, 0.0) == pytest.approx(15.0)


def test_messages_wait_for_each_other_on_a_slow_link() -> None:
    schedule = lowered(gpipe, 4)
    # Forwards: 1 + 4 messages of 3 + 1; backwards: 2 + 4 messages of 3 + 2.
    assert predicted_in_turn_s(schedule, EQUAL, 3.0, 0.0) == pytest.approx(14 + 16)
    assert predicted_in_turn_s(schedule, EQUAL, 3.0, 0.5) == pytest.approx(14 + 16 + 1)
    # Side by side, only the first one is waited for.
    assert predicted_s(schedule, EQUAL, 3.0, 0.0) == pytest.approx(15 + 6)


def test_both_directions_are_carried_at_once() -> None:
    schedule = lowered(one_f_one_b, 8)
    twice = tuple(Computed(8.0, 0.0, 16.0) for _ in range(2))
    there_and_back = predicted_in_turn_s(schedule, twice, 1.5, 0.0)
    assert there_and_back <= 27 + 8 * 3.0
    assert there_and_back >= 27 + 3.0


def test_who_is_not_root_is_told_so_in_one_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main.main(["--smallest"])
    assert str(ended.value).startswith("two_hosts: network namespaces are made by root only")
    assert "\n" not in str(ended.value) and capsys.readouterr().out == ""
    monkeypatch.setattr("shutil.which", lambda tool: None)
    assert why_not() == "ip and tc not found: install iproute2"


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@needs_hosts
def test_the_hosts_see_each_other_and_nothing_else_and_are_removed_after_a_failure() -> None:
    with pytest.raises(ZeroDivisionError), two_hosts() as hosts:
        assert all(name in namespaces() for name in hosts.names)
        for number in range(2):
            found = on_host(hosts, number, "ip", "-o", "link")
            assert {x.split(": ")[1].partition("@")[0] for x in found} == {"lo", INTERFACE}
            assert len(on_host(hosts, number, "ip", "route")) == 1  # to the other host
        hosts.throttle(1e8)
        assert "tbf" in on_host(hosts, 1, "tc", "qdisc", "show", "dev", INTERFACE)[0]
        hosts.throttle(None)
        assert "tbf" not in on_host(hosts, 1, "tc", "qdisc", "show", "dev", INTERFACE)[0]
        raise ZeroDivisionError
    assert not any(name in namespaces() for name in hosts.names)
    links = subprocess.run(["ip", "link"], capture_output=True, text=True).stdout
    assert "lo" in links and INTERFACE not in links


def on_host(hosts: TwoHosts, number: int, *command: str) -> list[str]:
    """Run a command on a host; give its lines."""
    done = subprocess.run([*hosts.command(number), *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


HEARS_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs are started without it
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_hosts_are_removed_after_ctrl_c(number: signal.Signals) -> None:
    command = [sys.executable, "-c", HEARS_CTRL_C, "-m", "benchmarks.two_hosts.main", "--smallest"]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        name = f"penstock-{process.pid}-a"
        while name not in namespaces():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert name not in namespaces()
    finally:
        process.kill()


@needs_hosts
@pytest.mark.slow
def test_a_rank_that_fails_is_quoted_and_the_hosts_are_removed() -> None:
    plan = {"work": {"no_such": 1}, "settings": []}
    quoted = r"rank \d ended with 1:(.|\n)*no_such"
    with pytest.raises(main.RankFailed, match=quoted), two_hosts() as hosts:
        main.run_ranks(hosts, plan)
    assert not any(name in namespaces() for name in hosts.names)
