"""`penstock train` in many processes is the run of one process, whatever happens to them."""

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import pytest

from penstock import Plan
from penstock.cli.main import run as command
from penstock_recipes.train.command import Request, start_run
from penstock_recipes.train.interrupt import Interrupt
from penstock_recipes.train.run_folder import RunFolder
from tests.digits import DIGITS, NUM_STEPS, TWO_EPOCHS
from tests.distributed.launch import Ended, start
from tests.profiles import cluster
from tests.quiet import quiet
from tests.runs import assert_same_run, begin, curve, sets

SMALL = (*TWO_EPOCHS, "train.average_decay=0.5")
TRAIN = ("-m", "penstock")
TORCHRUN = ("-m", "torch.distributed.run")


def faulty(action: str, ranks: str, step: int) -> tuple[str, ...]:
    return ("-m", "tests.distributed.train_job", action, ranks, str(step))


def words(*changes: str, recipe: str = str(DIGITS)) -> list[str]:
    return ["train", recipe, *sets(*SMALL, *changes)]


def outcome(process: "subprocess.Popen[str]", timeout_s: float = 250.0) -> tuple[int, str]:
    """Wait for a process to end, and leave nothing of it behind if it does not end in time."""
    with process:
        try:
            said, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    return process.returncode, said


def run(arguments: Sequence[str], folder: Path, code: int = 0) -> str:
    ended, said = outcome(begin(arguments, folder))
    assert ended == code, said
    return said


def elastic(job: Sequence[str], *, processes: int, restarts: int = 1) -> list[str]:
    counts = ("--nproc-per-node", str(processes), "--max-restarts", str(restarts))
    return [*TORCHRUN, "--standalone", *counts, *job]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in curve(folder) if line["kind"] == "step"]


def assert_resumed(said: str, how: str = "") -> None:
    """See that a run went on: from step 4, or from the epoch's end if that was not yet whole."""
    places = [f"resuming {Path('runs/digits-1')} after step {step}{how}" for step in (3, 4)]
    assert any(place in said for place in places), said


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in one process, never interrupted."""
    folder = tmp_path_factory.mktemp("one") / "run"
    assert start_run(Request(DIGITS, SMALL, folder), quiet(), Interrupt()).finished
    return folder


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train as two stages in two replicas, never interrupted."""
    folder = tmp_path_factory.mktemp("replicas")
    run([*TRAIN, *words("pipeline.num_replicas=2"), "--num-processes", "4"], folder)
    return folder / "runs" / "digits-1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "changes", "told"),
    [
        (("kill", "1", 5), (), "rank 1 (stage 1)"),  # the other one says who was lost
        *((fault, (), "") for fault in (("raise", "1", 6), ("kill", "0", 6))),
        (("stop", "1", 5), ("pipeline.timeout_s=5",), "No sign of life from rank 1 (stage 1)"),
    ],
)
def test_a_process_that_fails_is_started_again_and_the_run_goes_on_bit_by_bit(
    fault, changes, told, uninterrupted, tmp_path
) -> None:
    said = run(elastic([*faulty(*fault), *words(*changes)], processes=2), tmp_path)
    assert told in said
    assert_resumed(said)
    assert_same_run(tmp_path / "runs" / "digits-1", uninterrupted)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["digits-1"]


@pytest.mark.slow
def test_sigterm_to_one_process_saves_on_all_and_any_other_number_goes_on(
    uninterrupted: Path, tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    ended = start(2, [*faulty("term", "1", 3), *words(), "--run-folder", folder]).wait(60)
    assert all(process.code == 128 + signal.SIGTERM for process in ended), ended
    assert "interrupted after step 3; everything is saved" in ended[0].output
    ended = start(3, [*TRAIN, "train", "--resume", folder]).wait(60)
    assert all(process.code == 0 for process in ended), ended
    assert "after step 3, as 3 stages x 1 replica (before: 2 x 1)" in ended[0].output
    assert_same_run(Path(folder), uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "replicas"), ((1, 2), (2, 2)))
def test_a_plan_that_was_chosen_for_a_recipe_trains_it(stages, replicas, tmp_path) -> None:
    cluster(4).save(tmp_path / "cluster.toml")
    plan, profile = tmp_path / "plan.json", str(tmp_path / "profile.json")
    small = sets(*SMALL)
    counted = ("--device", "h100", "--microbatch-size", "50", "--save", profile)
    assert command(["profile", str(DIGITS), *small, *counted]) == 0
    layout = ("--num-ranks", str(stages), "--num-replicas", str(replicas))
    chosen = ("--profile", profile, "--cluster", str(tmp_path / "cluster.toml"), *layout)
    assert command(["plan", *chosen, "--batch-size", "500", "--save", str(plan)]) == 0
    folder = str(tmp_path / "run")
    arguments = [*TRAIN, *words("train.epochs=1"), "--plan", str(plan), "--run-folder", folder]
    ended = start(stages * replicas, arguments).wait(100)
    assert all(process.code == 0 for process in ended), ended
    assert (Plan.load(Path(folder) / "plan.json").placement.num_replicas) == replicas


@pytest.mark.slow
def test_sigterm_to_the_command_reaches_its_processes_and_another_number_goes_on(tmp_path) -> None:
    folder = RunFolder(tmp_path / "run")
    first = [*words("train.epochs=2000"), "--run-folder", "run", "--num-processes", "2"]
    again = ["train", "--resume", "run", "--num-processes", "3"]
    done = 0
    for arguments in (first, again):
        process = begin([*TRAIN, *arguments], tmp_path)
        assert process.stdout is not None
        said_so_far = list(takewhile(lambda line: not line.startswith("epoch"), process.stdout))
        process.send_signal(signal.SIGTERM)
        code, said = outcome(process)
        assert code == 128 + signal.SIGTERM, (said_so_far, said)
        assert "Traceback" not in said
        assert said.splitlines()[-1].endswith("Go on with: penstock train --resume run")
        before, done = done, max(line["step"] for line in folder.read_metrics())
        assert done > before and folder.checkpoints()[-1] == folder.checkpoint_path(done)
    assert any("as 3 stages x 1 replica (before: 2 x 1)" in line for line in said_so_far)


def test_every_process_refuses_a_run_folder_that_is_taken(uninterrupted, tmp_path) -> None:
    before = sorted(uninterrupted.rglob("*"))
    arguments = [*TRAIN, *words(), "--run-folder", str(uninterrupted)]
    ended = start(2, arguments).wait(60)
    for process in ended:
        assert process.code == 2, process.output
        assert f"penstock: rank {process.rank}: the run folder" in process.output
        assert "never overwritten" in process.output
    assert sorted(uninterrupted.rglob("*")) == before


def refused(ended: list[Ended], *parts: str) -> None:
    for process in ended:
        assert process.code == 2, process.output
        assert "Traceback" not in process.output, process.output
        for part in parts:
            assert part in process.output, process.output


@pytest.mark.parametrize(
    ("what", "said"),
    [
        pytest.param(
            "seed", "do not agree on seed: 0 on rank 0; 1 on rank 1", marks=pytest.mark.slow
        ),
        ("version", "do not agree on version of Penstock: '0.0.0' on rank 0; '0.0.1' on rank 1"),
    ],
)
def test_processes_that_differ_are_refused_everywhere(what: str, said: str) -> None:
    job = start(2, [*faulty(what, "0,1", 0), *words("train.epochs=3")])
    refused(job.wait(60), said)


@pytest.mark.slow
def test_a_signal_that_one_process_gets_after_all_agreed_counts_a_step_later(tmp_path) -> None:
    folder = RunFolder(tmp_path / "run")
    command = [*faulty("late", "1", 2), *words("train.checkpoint_every=60")]
    ended = start(2, [*command, "--run-folder", str(folder.path)]).wait(60)
    for process in ended:
        assert process.code == 128 + signal.SIGTERM, process.output
    assert "everything is saved" in ended[0].output
    assert folder.checkpoints() == [folder.checkpoint_path(2)]


@pytest.mark.slow
def test_a_checkpoint_with_a_missing_file_is_refused_everywhere(uninterrupted, tmp_path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(uninterrupted, copy)
    broken = RunFolder(copy).checkpoints()[-1] / "optimizer.safetensors"
    broken.unlink()
    ended = start(2, [*TRAIN, "train", "--resume", str(copy)]).wait(60)
    refused(ended, "optimizer.safetensors is damaged: it is missing", "delete")
    assert (copy / "metrics.jsonl").read_text() == (uninterrupted / "metrics.jsonl").read_text()


@pytest.fixture
def taken_port() -> Iterator[int]:
    """Give a port that something else listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.mark.slow
def test_a_port_in_use_is_an_error_on_every_process(taken_port: int, tmp_path: Path) -> None:
    arguments = [*TRAIN, *words("pipeline.timeout_s=4", "pipeline.num_stages=2")]
    job = start(2, arguments, {"MASTER_PORT": str(taken_port)})
    ended = job.wait(80)
    refused(ended, f"did not find the others at 127.0.0.1:{taken_port} within 4 s")
    assert "in use" in ended[0].output


@pytest.mark.slow
def test_an_unreachable_peer_is_named_in_time(tmp_path: Path) -> None:
    arguments = [*TRAIN, *words("pipeline.timeout_s=4", "pipeline.num_stages=3")]
    job = start(3, arguments, only=(0, 2))
    refused(job.wait(80), "did not find the others", "within 4 s")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_set_aside_for_the_one_before(uninterrupted, tmp_path) -> None:
    """The recipe is being edited meanwhile, too; a restart takes the run as it was begun."""
    recipe = tmp_path / "mine.toml"
    shutil.copy(DIGITS, recipe)
    job = [*faulty("damage", "0", 6), *words(recipe="mine.toml")]
    said = run(elastic(job, processes=2), tmp_path)
    assert "step-000004 is set aside: " in said and "is damaged" in said
    assert f"resuming {Path('runs/mine-1')} after step 3" in said  # the first epoch's end
    assert_same_run(tmp_path / "runs" / "mine-1", uninterrupted)


@pytest.mark.slow
def test_a_lost_host_leaves_fewer_processes_which_go_on(two_replicas, port, tmp_path) -> None:
    """Two hosts of two processes; one is lost: K shrinks to 1, D stays, and so do all bits.

    The times are long enough for a busy machine, where a host comes late or shows no sign of life
    for a while: one that is given up as lost while it is being joined fails the job, not the run.
    """
    command = [
        *(*TORCHRUN, "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
        *("--rdzv-id", "lost-host"),
        *("--rdzv-conf", "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=10"),
        *(*faulty("lose", "2,3", 5), *words("pipeline.num_replicas=2")),
    ]
    first = begin(command, tmp_path)
    time.sleep(1.0)  # the first one keeps the store, so it must be the one that stays
    second = begin(command, tmp_path)
    try:
        code, said = outcome(first)
    finally:
        outcome(second)
    assert code == 0, said
    assert_resumed(said, ", as 1 stage x 2 replicas (before: 2 x 2)")
    assert_same_run(tmp_path / "runs" / "digits-1", two_replicas)


@pytest.mark.slow
def test_replicas_train_the_same_model_but_for_rounding(
    uninterrupted: Path, two_replicas: Path, tmp_path: Path
) -> None:
    assert losses(two_replicas) == pytest.approx(losses(uninterrupted), rel=1e-4)
    again = ["train", "--resume", str(two_replicas), "--json"]
    run([*TRAIN, *again], tmp_path, code=2)  # it is finished


@pytest.mark.slow
def test_replicas_that_share_out_the_optimizer_train_the_same_bits(tmp_path: Path) -> None:
    """In float16, with clipped gradients, and killed on the way."""
    changes = (
        "pipeline.num_replicas=2",
        "train.precision=float16",
        "train.max_grad_norm=0.5",
        "train.average_decay=0",
    )
    run([*TRAIN, *words(*changes), "--num-processes", "4", "--run-folder", "whole"], tmp_path)
    job = [*faulty("kill", "2", 5), *words(*changes, "pipeline.shard_optimizer=true")]
    said = run(elastic(job, processes=4), tmp_path)
    assert_resumed(said)
    assert_same_run(tmp_path / "runs" / "digits-1", tmp_path / "whole")


@pytest.mark.slow
def test_one_process_goes_on_with_what_two_replicas_began(tmp_path: Path) -> None:
    job = [*faulty("term", "1", 3), *words("pipeline.num_replicas=2")]
    outcome(begin(elastic(job, processes=4, restarts=0), tmp_path))
    said = run([*TRAIN, "train", "--resume", "runs/digits-1", "--json"], tmp_path)
    summary = json.loads(said.splitlines()[-1])
    assert summary["finished"] and summary["steps"] == NUM_STEPS
