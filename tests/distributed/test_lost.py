"""A process or a host that is gone is noticed long before any deadline, and all others end."""

import re
import socket
from pathlib import Path

import pytest

from benchmarks.two_hosts.hosts import ADDRESSES, two_hosts, why_not
from benchmarks.two_hosts.lost_host import lose_a_host
from tests.distributed.launch import start

NO_HOSTS = why_not()


@pytest.mark.parametrize("killed", (1, pytest.param(0, marks=pytest.mark.slow)))
def test_a_killed_process_is_noticed_though_its_child_holds_its_connections(killed: int) -> None:
    job = start(3, ["-m", "tests.distributed.lost_job", str(killed)])
    for process in job.wait(60.0, num_left=1):
        if process.rank == killed:
            assert process.code == -9
            continue
        assert process.code == 1, process.output
        said = f"ENDED PeerError: rank {killed} (stage {killed}) failed: it has ended or was"
        assert said in process.output and f"on host {socket.gethostname()}" in process.output
        assert f"rank {process.rank} (stage {process.rank}) waited" in process.output


def test_a_process_that_is_killed_during_a_save_ends_it_on_all(tmp_path: Path) -> None:
    job = start(3, ["-m", "tests.distributed.lost_job", "1", str(tmp_path / "save")])
    first, killed, last = job.wait(60.0, num_left=1)
    assert killed.code == -9
    for process in (first, last):
        assert process.code == 1, process.output
        assert "ENDED PeerError: rank 1 (stage 1) failed: it has ended or was" in process.output
        assert f"rank {process.rank} (stage {process.rank}) waited for all" in process.output
    assert not (tmp_path / "save").exists()


@pytest.mark.skipif(NO_HOSTS is not None, reason=NO_HOSTS or "")
@pytest.mark.slow
def test_a_lost_host_is_named_by_all_processes_on_both_sides_of_the_link() -> None:
    with two_hosts() as hosts:
        for process in lose_a_host(hosts, timeout_s=3600.0):
            (other,) = set(ADDRESSES) - {process.address}
            assert process.seconds is not None, process
            assert f"({other}), where it ran, does not answer: lost, or cut off" in process.said
            lost = "0" if other == ADDRESSES[0] else "[23]"
            assert re.search(rf"PeerError: rank {lost} \(stage {lost}\) failed", process.said)


STOPPED = """
import os, signal, threading, torch
from torch import nn
import penstock
torch.set_num_threads(1)
mesh = penstock.init_mesh(timeout_s=3600.0)
processes = mesh.world.gather(os.getpid(), "for the others' ids")
layers = [nn.Linear(2, 2) for _ in range(3)]
pipe = penstock.Pipeline(layers, mesh=mesh, loss=nn.MSELoss())
pipe.train_step(torch.ones(2, 2), torch.zeros(2, 2))
if mesh.rank == 0:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
if mesh.rank == 2:
    layers[2].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
try:
    pipe.train_step(torch.ones(2, 2), torch.zeros(2, 2))
except penstock.PenstockError as error:
    print(f"ENDED {type(error).__name__}: {error}", flush=True)
os.kill(processes[2], signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_wait_for_a_stopped_process_ends_when_another_one_is_killed() -> None:
    killed, waited, _ = start(3, ["-c", STOPPED]).wait(60.0)
    assert killed.code == -9
    assert waited.code is not None, waited.output
    assert "ENDED PeerError: rank 0 (stage 0) failed" in waited.output
    assert "rank 1 (stage 1) waited at 1B0<2 for the gradient" in waited.output


LOSE = """
import os, signal, sys, weakref
import penstock, torch.distributed as dist
class Last:
    def __del__(self, write=os.write):
        write(1, b"THE INTERPRETER GOES")
last = Last()
mesh = penstock.init_mesh(timeout_s=60.0)
if mesh.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
group = weakref.ref(dist.group.WORLD)
"""
RAISE = "mesh.world.highest(0, 'for the other')"
CATCH = f"""
try:
    {RAISE}
except penstock.PenstockError:
    mesh.close()
print("KEPT" if group() is not None else "DESTROYED", flush=True)
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("then", "code"),
    [pytest.param(RAISE, 1, marks=pytest.mark.slow), (CATCH, 75)],
    ids=["raises", "catches"],
)
def test_what_connects_a_process_with_one_that_is_gone_is_never_destroyed(then, code) -> None:
    ended, _ = start(2, ["-c", LOSE + then]).wait(60.0)
    assert ended.code == code, ended.output
    assert ("KEPT" in ended.output) == (code == 75), ended.output
    assert ("THE INTERPRETER GOES" in ended.output) == (code == 75), ended.output
