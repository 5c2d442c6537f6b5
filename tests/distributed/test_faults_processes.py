"""A process that fails, dies or stops: all others end soon, each names it, and nothing is lost."""

import re
import signal
import time
from collections.abc import Callable
from itertools import count, product
from pathlib import Path

import pytest
import torch

import penstock
from tests.distributed.fault_job import FAULTY_STEP, STEPS, newest, train
from tests.distributed.launch import Ended, run, start
from tests.side_by_side import saved_tensors

Fault = tuple[int, str, str]
"""The rank, the instruction at which it goes wrong, and how."""
Weights = dict[str, torch.Tensor]
ACTIONS = ("raise", "kill", "stop")
QUICK: list[Fault] = [(0, "Forward", "raise"), (1, "SendGradient", "kill")]
FAULTS: list[Fault] = [*QUICK, (1, "Recompute", "kill"), (2, "Backward", "stop")]
FAULTS += [(1, "SendActivation", "raise"), (2, "ReceiveActivation", "kill")]
FAULTS += [(0, "ReceiveGradient", "stop"), (0, "PostReceive", "kill")]
FAULTS += [(1, "CommitStatistics", "stop"), (2, "Save", "raise"), (0, "Save", "kill")]
FAULTS += [(1, "Save", "stop")]
"""Each kind of instruction, which decides what the others wait for; each rank with each action,
which decide how the others learn of it.
"""
OF_REPLICAS: list[Fault] = [(0, "ReduceGradients", "raise"), (3, "ReduceGradients", "kill")]
OF_REPLICAS += [(0, "ReduceGradients", "stop"), (3, "SendGradient", "raise"), (0, "Save", "stop")]
"""What only replicas do, in each way; of the rest, which goes wrong above, two."""
QUICK_OF_SHARDS: list[tuple[int, Fault]] = [(1, (1, "Layer", "kill")), (2, (2, "Layer", "raise"))]
OF_SHARDS: list[tuple[int, Fault]] = [*QUICK_OF_SHARDS, (1, (0, "Layer", "raise"))]
OF_SHARDS += [(1, (1, "Batch", "none")), (1, (0, "Save", "kill")), (2, (3, "Forward", "kill"))]
OF_SHARDS += [(2, (3, "Backward", "raise")), (2, (0, "Layer", "stop"))]
OF_SHARDS += [(2, (1, "Batch", "fewer")), (2, (1, "Batch", "wider"))]
OF_SHARDS += [(2, (3, "Batch", "precise"))]
"""How many stages there are, of two shards each, and what goes wrong: with the other shards inside
a layer, in which they wait for each other, or with what it was given.
"""
THREE = {"NUM_LAYERS": "3"}
TWO = {"NUM_LAYERS": "2"}
MODULE = "tests.distributed.fault_job"


def name_of(fault: Fault) -> str:
    rank, kind, action = fault
    return f"{action}-{kind}-{rank}"


def name_in_shards(fault: tuple[int, Fault]) -> str:
    return f"{fault[0]}x2-{name_of(fault[1])}"


def names(num_stages: int, num_replicas: int, num_shards: int = 1) -> list[str]:
    """Say how each rank is called in messages."""
    of = [f" of replica {r}" if num_replicas > 1 else "" for r in range(num_replicas)]
    shards = [f", shard {s}" if num_shards > 1 else "" for s in range(num_shards)]
    stages = [f"stage {s}{r}{shard}" for r in of for s in range(num_stages) for shard in shards]
    return [f"rank {rank} ({stage})" for rank, stage in enumerate(stages)]


def in_shards(num_stages: int) -> dict[str, str]:
    return {"NUM_LAYERS": str(num_stages), "SHARDS": "2"}


def end_with(
    fault: Fault, folder: Path, *, replicas: int = 1, of_shards: int | None = None
) -> list[Ended]:
    """Run the job with a fault; return how its processes ended.  `of_shards` stages have two
    shards each.
    """
    rank, kind, action = fault
    world, environment = (3, THREE) if replicas == 1 else (4, TWO)
    if of_shards is not None:
        world, environment = 2 * of_shards, in_shards(of_shards)
    arguments = ["-m", MODULE, str(rank), kind, action, str(replicas), str(folder)]
    job, began = start(world, arguments, environment), time.monotonic()
    for process in (p for r, p in enumerate(job.processes) if r != rank):
        process.wait(60)
    assert time.monotonic() - began < 60
    if action == "stop":
        job.processes[rank].send_signal(signal.SIGKILL)
    return job.wait(30)


def check_ends(ended: list[Ended], fault: Fault, called: list[str]) -> None:
    """See that every process ended, and that each other one named the culprit."""
    rank, kind, action = fault
    for process in ended:
        if process.rank == rank:
            assert process.code != 0
            continue
        assert process.code == 1, process.output
        assert "ENDED" in process.output, process.output
        if kind == "Batch" and action != "none":  # seen by all alike
            assert "ENDED BatchError" in process.output, process.output
            assert re.search(rf"\brank {rank}[ :]", process.output), process.output
            continue
        if (kind, action) == ("Save", "raise"):  # refused by all alike: nothing is broken
            assert "ENDED CheckpointError" in process.output, process.output
            assert f"rank {rank}: " in process.output, process.output
            continue
        # A broken connection tells who is gone; only the culprit's own report tells why.
        failed = " failed: ValueError: injected" if action == "raise" else ""
        assert f"{called[rank]}{failed}" in process.output, process.output
        assert f"{called[process.rank]} waited" in process.output, process.output


def weights(checkpoint: Path | None) -> Weights:
    assert checkpoint is not None and checkpoint.name == f"step-{STEPS}"
    return saved_tensors(checkpoint)


def go_on_here(num_stages: int) -> Callable[[Path], None]:
    """Give what finishes a run in this process, with a thread for each stage."""

    def finish(folder: Path) -> None:
        assert train(penstock.init_mesh(num_stages), 3, folder) in (
            FAULTY_STEP - 2,
            FAULTY_STEP - 1,
        )

    return finish


def go_on_in_processes(world: int, replicas: int = 1) -> Callable[[Path], None]:
    """Give what finishes a run in so many processes."""
    environment = THREE if replicas == 1 else TWO
    job = ["-m", MODULE, "none", "none", "none", str(replicas)]
    return lambda folder: assert_all_well(run(world, [*job, str(folder)], environment=environment))


def go_on_in_shards(num_stages: int) -> Callable[[Path], None]:
    """Give what finishes a run in two shards of each stage."""
    job = ["-m", MODULE, "none", "none", "none", "1"]
    world, environment = 2 * num_stages, in_shards(num_stages)
    return lambda folder: assert_all_well(run(world, [*job, str(folder)], environment=environment))


def assert_all_well(ended: list[Ended]) -> None:
    assert all("ENDED" not in process.output for process in ended)


WAYS_ON = (go_on_here(1), go_on_in_processes(2), go_on_here(3), go_on_here(2))
"""Layouts that a broken run goes on with, in turn."""
TURN = count()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Train without any fault."""
    folder = tmp_path_factory.mktemp("whole")
    train(penstock.init_mesh(1), 3, folder)
    return weights(newest(folder))


@pytest.fixture(scope="module")
def expected_of_replicas(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    folder = tmp_path_factory.mktemp("replicas")
    go_on_in_processes(4, 2)(folder)
    return weights(newest(folder))


@pytest.fixture(scope="module")
def expected_of_shards(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Weights]:
    found = {}
    for num_stages in (1, 2):
        folder = tmp_path_factory.mktemp("shards")
        go_on_in_shards(num_stages)(folder)
        found[num_stages] = weights(newest(folder))
    return found


def check(
    fault: Fault,
    folder: Path,
    expected: Weights,
    go_on: Callable[[Path], None],
    *,
    replicas: int = 1,
) -> None:
    ended = end_with(fault, folder, replicas=replicas)
    check_ends(ended, fault, names(3 if replicas == 1 else 2, replicas))
    check_goes_on(folder, expected, go_on)


def check_goes_on(folder: Path, expected: Weights, go_on: Callable[[Path], None]) -> None:
    """See that a run that broke goes on from its newest checkpoint to the same weights."""
    left = newest(folder)
    assert left is not None and left.name < f"step-{STEPS}"
    go_on(folder)
    found = weights(newest(folder))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_each_rank_goes_wrong_in_each_way() -> None:
    assert {(rank, action) for rank, _, action in FAULTS} == set(product(range(3), ACTIONS))


@pytest.mark.parametrize(
    "fault",
    [QUICK[0], *(pytest.param(f, marks=pytest.mark.slow) for f in FAULTS[1:])],
    ids=name_of,
)
def test_a_fault_ends_all_is_named_and_costs_nothing(fault, expected, tmp_path) -> None:
    check(fault, tmp_path, expected, WAYS_ON[next(TURN) % len(WAYS_ON)])


@pytest.mark.slow
@pytest.mark.parametrize("fault", OF_SHARDS, ids=name_in_shards)
def test_a_fault_of_one_shard_costs_nothing(fault, expected_of_shards, tmp_path) -> None:
    """Go on in as many shards: sums are in the same order, and so are all bits."""
    num_stages, own = fault
    ended = end_with(own, tmp_path, of_shards=num_stages)
    check_ends(ended, own, names(num_stages, 1, 2))
    check_goes_on(tmp_path, expected_of_shards[num_stages], go_on_in_shards(num_stages))


OF_1_2 = ["rank 0 (stage 0)", "rank 1 (stage 1, shard 0)", "rank 2 (stage 1, shard 1)"]
OF_2_1 = ["rank 0 (stage 0, shard 0)", "rank 1 (stage 0, shard 1)", "rank 2 (stage 1)"]
UNLIKE: dict[str, tuple[Fault, list[str]]] = {
    "1 2": ((2, "ReceiveActivation", "kill"), OF_1_2),
    "2 1": ((1, "SendActivation", "kill"), OF_2_1),
}
"""While other shards gather what came to it, or wait for its part of a message."""


@pytest.mark.slow
@pytest.mark.parametrize("shards", UNLIKE)
def test_a_fault_of_one_shard_of_unlike_meshes_is_named(shards: str, tmp_path: Path) -> None:
    fault, called = UNLIKE[shards]
    arguments = ["-m", MODULE, *map(str, fault), "1", str(tmp_path)]
    ended = start(3, arguments, {**TWO, "SHARDS": shards}).wait(60)
    check_ends(ended, fault, called)


@pytest.mark.slow
def test_a_fault_where_processes_run_several_stages_names_them(tmp_path: Path) -> None:
    arguments = ["-m", MODULE, "1", "Backward", "kill", "1", str(tmp_path)]
    environment = {"NUM_LAYERS": "4", "STAGES_PER_RANK": "2"}
    ended = start(2, arguments, environment).wait(60)
    called = ["rank 0 (stages 0 and 2)", "rank 1 (stages 1 and 3)"]
    check_ends(ended, (1, "Backward", "kill"), called)


@pytest.mark.slow
@pytest.mark.parametrize("fault", OF_REPLICAS, ids=name_of)
def test_a_fault_of_one_replica_too(fault, expected_of_replicas, tmp_path) -> None:
    """Go on with fewer stages: replicas stay, and so do all bits."""
    check(fault, tmp_path, expected_of_replicas, go_on_in_processes(2, 2), replicas=2)
