"""A process that fails, dies or stops: all others end soon, and each names it."""

import signal
import time

import pytest

from tests.distributed.launch import Ended, start

KINDS = (
    "Forward",
    "Recompute",
    "Backward",
    "SendActivation",
    "ReceiveActivation",
    "SendGradient",
    "ReceiveGradient",
    "PostReceive",
    "CommitStatistics",
)
LACKS = {
    (0, "ReceiveActivation"),
    (0, "SendGradient"),
    (2, "SendActivation"),
    (2, "ReceiveGradient"),
}
"""What the first and the last stage never do."""
FAULTS = [
    pytest.param(rank, kind, action, id=f"{action}-{kind}-{rank}")
    for rank in range(3)
    for kind in KINDS
    for action in ("raise", "kill", "stop")
    if (rank, kind) not in LACKS
]
QUICK = FAULTS[::9]


def end_with(
    rank: int, kind: str, action: str, *, world: int = 3, replicas: int = 1
) -> list[Ended]:
    """Run the job; give how the processes ended, and how long after the first one."""
    arguments = ["-m", "tests.distributed.fault_job", str(rank), kind, action, str(replicas)]
    job = start(world, arguments)
    began = time.monotonic()
    others = [p for r, p in enumerate(job.processes) if r != rank]
    for process in others:
        process.wait(60)
    assert time.monotonic() - began < 60
    if action == "stop":
        job.processes[rank].send_signal(signal.SIGKILL)
    return job.wait(30)


@pytest.mark.parametrize(("rank", "kind", "action"), QUICK)
def test_a_fault_ends_all_processes_and_is_named(rank: int, kind: str, action: str) -> None:
    check(rank, kind, action)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "kind", "action"), [f for f in FAULTS if f not in QUICK])
def test_every_fault_ends_all_processes_and_is_named(rank: int, kind: str, action: str) -> None:
    check(rank, kind, action)


def check(rank: int, kind: str, action: str) -> None:
    ended = end_with(rank, kind, action)
    for process in ended:
        if process.rank == rank:
            assert process.code != 0
            continue
        assert process.code == 1, process.output
        assert "ENDED" in process.output, process.output
        assert f"rank {rank} (stage {rank})" in process.output, process.output
        assert f"rank {process.rank} (stage {process.rank}) waited" in process.output
