"""A run that stops and goes on is the run that never stopped, bit by bit, in any schedule."""

import io
import json
import signal
import subprocess
import threading
from itertools import takewhile
from pathlib import Path

import pytest

from penstock.checkpoint import save_checkpoint
from penstock.cli.main import run
from penstock.errors import CheckpointError
from penstock_recipes.errors import RecipeError, RunFolderError
from penstock_recipes.recipe.read import read_recipe, recipe_to_toml
from penstock_recipes.train.command import Request, resume_run
from penstock_recipes.train.interrupt import Interrupt
from penstock_recipes.train.loop import Trainer
from penstock_recipes.train.run_folder import RunFolder, create
from tests.digits import DIGITS, NUM_STEPS, TWO_EPOCHS
from tests.quiet import quiet
from tests.runs import (
    assert_same_run,
    begin,
    curve,
    resume,
    sets,
    start,
    stopped,
    train_until,
)

SMALL = (*TWO_EPOCHS, "train.trace_every=1")
TRAIN = ("-m", "penstock", "train", str(DIGITS), "--run-folder", "run")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert start(DIGITS, SMALL, folder).finished
    return folder


LAYOUTS = {
    1: ["pipeline.num_stages=3", "pipeline.schedule=one_f_one_b"],
    5: ["pipeline.partition=[1, 7]", "pipeline.recompute=never"],
}
"""Of one stage are runs on images, which stop at another step."""


@pytest.mark.parametrize("stop", LAYOUTS)
def test_a_resumed_run_is_the_uninterrupted_one_for_any_other_layout(
    uninterrupted: Path, tmp_path: Path, stop: int
) -> None:
    folder = stopped(read_recipe(DIGITS, SMALL), tmp_path / "run", stop)
    summary = resume(folder.path, LAYOUTS[stop])
    assert summary.finished and summary.steps == NUM_STEPS
    assert_same_run(folder.path, uninterrupted)


@pytest.mark.slow
def test_a_run_of_lower_precision_goes_on_bit_by_bit_with_its_loss_scale(tmp_path: Path) -> None:
    changes = [*SMALL, "train.precision=float16", "train.max_grad_norm=0.5"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert start(DIGITS, changes, whole).finished
    stopped(read_recipe(DIGITS, changes), broken, 4)
    layout = ["pipeline.num_stages=3", "pipeline.schedule=one_f_one_b"]
    assert resume(broken, layout).finished
    assert_same_run(broken, whole)


def test_a_resumed_run_remembers_its_loss_scale(tmp_path: Path) -> None:
    recipe = read_recipe(DIGITS, [*SMALL, "train.precision=float16"])
    folder = create(tmp_path / "run", recipe_to_toml(recipe))
    with Trainer(recipe) as trainer:
        trainer.scaler.load_state_dict({**trainer.scaler.state_dict(), "scale": 512.0})
        train_until(trainer, folder, 2)
    with Trainer(recipe) as later:
        assert later.scaler.get_scale() != 512.0
        later.resume(folder)
        assert later.scaler.get_scale() == 512.0


def test_a_run_that_was_killed_goes_on_from_its_newest_checkpoint(uninterrupted, tmp_path) -> None:
    folder = stopped(read_recipe(DIGITS, SMALL), tmp_path / "run", 5)
    for path in folder.checkpoints():
        if path.name > "step-000002":
            path.rename(path.with_name(f".{path.name}.xyz.unfinished"))  # killed while saving
    first, rest = folder.metrics_path.read_bytes().split(b"\n", 1)
    folder.metrics_path.write_bytes(first + b"\n\xff{]\n" + rest + b'{"kind": "step", "st')
    console = quiet()
    assert resume_run(Request(None, [], folder.path), console, Interrupt()).finished
    assert_same_run(folder.path, uninterrupted)
    assert isinstance(console.file, io.StringIO)
    assert "1 damaged lines of" in console.file.getvalue()


@pytest.mark.slow
def test_a_run_without_any_checkpoint_starts_again(uninterrupted: Path, tmp_path: Path) -> None:
    folder = create(tmp_path / "run", recipe_to_toml(read_recipe(DIGITS, SMALL)))
    folder.append_metrics({"kind": "step", "step": 1, "loss": 0.0})
    assert resume(folder.path).steps == NUM_STEPS and curve(folder.path) == curve(uninterrupted)


def test_the_whole_curve_is_there_once(uninterrupted: Path) -> None:
    lines = curve(uninterrupted)
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [line["epoch"] for line in lines if line["kind"] == "epoch"] == [1, 2]


def test_the_loss_of_an_epoch_is_the_mean_over_its_samples(uninterrupted: Path) -> None:
    lines, sizes = curve(uninterrupted), [500, 500, 438]
    for epoch in (1, 2):
        losses = [line["loss"] for line in lines if line["kind"] == "step"][3 * epoch - 3 :]
        mean = sum(loss * size for loss, size in zip(losses, sizes, strict=False)) / sum(sizes)
        found = [x for x in lines if x["kind"] == "epoch"][epoch - 1]["train_loss"]
        assert found == pytest.approx(mean)


def test_a_run_folder_holds_what_the_run_was(uninterrupted: Path) -> None:
    names = {path.name for path in uninterrupted.iterdir()}
    read = {"plan.json", "plans", "recipe.toml", "environment.json", "data.digest"}
    read |= {"checkpoints", "best.json"}
    told = {"timeline.json", "timeline.chrome.json", "step.json", "memory.json", "summary.json"}
    assert names - {".lock"} == {*read, *told, "metrics.jsonl", "report.html"}
    assert read_recipe(uninterrupted / "recipe.toml") == read_recipe(DIGITS, SMALL)


@pytest.mark.parametrize(
    "changes, recipe, error, message",
    [
        (["pipeline.num_microbatches=4"], None, RecipeError, "was 8 and cannot become 4 on res"),
        ([], None, RunFolderError, "has trained all its 2 epochs"),
        ([], DIGITS, RecipeError, r"model\.width was 4 and cannot become 32 on resume"),
    ],
)
def test_what_cannot_go_on_is_refused(uninterrupted, changes, recipe, error, message) -> None:
    with pytest.raises(error, match=message):
        resume(uninterrupted, changes, recipe)


def test_a_run_that_trains_cannot_be_resumed_by_another_job(uninterrupted: Path) -> None:
    lock = RunFolder(uninterrupted).lock()
    assert lock is not None
    with pytest.raises(RunFolderError, match="another job trains in"):
        resume(uninterrupted)
    lock.release()


def test_a_damaged_checkpoint_is_named_with_the_way_out(tmp_path: Path) -> None:
    folder = stopped(read_recipe(DIGITS, SMALL), tmp_path / "run", 4)
    (folder.checkpoint_path(4) / "model.safetensors").write_bytes(b"")
    way_out = r"damaged.*\nTo resume from .*step-000003, delete .*step-000004$"
    with pytest.raises(CheckpointError, match=way_out):
        resume(folder.path)
    for step in (2, 3):  # the third is the best
        (folder.checkpoint_path(step) / "optimizer.safetensors").write_bytes(b"")
    way_out = r"damaged.*\nNo other checkpoint in .* is sound.* begin again at step 0"
    with pytest.raises(CheckpointError, match=way_out):
        resume(folder.path)


def test_a_checkpoint_that_no_run_saved_is_refused(tmp_path: Path) -> None:
    recipe = read_recipe(DIGITS, SMALL)
    folder = create(tmp_path / "run", recipe_to_toml(recipe))
    with Trainer(recipe) as trainer:
        save_checkpoint(folder.checkpoint_path(1), trainer.pipe, trainer.optimizer, position={})
    with pytest.raises(CheckpointError, match="not saved by `penstock train`: it has no recipe"):
        resume(folder.path)


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
    for path, changes in ((ours, []), (theirs, ["train.seed=1", "optimizer.lr=0.5"])):
        recipe = read_recipe(DIGITS, [*SMALL, *changes])
        folder = create(path, recipe_to_toml(recipe))
        with Trainer(recipe) as trainer:
            train_until(trainer, folder, 3)
    before = curve(ours)
    RunFolder(theirs).checkpoint_path(3).rename(RunFolder(ours).checkpoint_path(5))
    differs = "step-000005 is of another run: optimizer.lr is 0.5 there and 0.005 here; train.see"
    with pytest.raises(RunFolderError, match=differs):
        resume(ours, ["pipeline.num_stages=1"])
    assert curve(ours) == before and len(RunFolder(ours).checkpoints()) == 3


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    words = ["-u", *TRAIN, *sets(*SMALL, "train.epochs=2000")]  # each line is seen at once
    process = begin(words, tmp_path, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said_so_far = list(takewhile(lambda line: not line.startswith("epoch"), process.stderr))
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, (said_so_far, errors)
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].endswith("Go on with: penstock train --resume run")
    folder = RunFolder(tmp_path / "run")
    done = max(line["step"] for line in folder.read_metrics())
    assert folder.checkpoints()[-1] == folder.checkpoint_path(done)
    assert f"run after {done} steps" in said


@pytest.mark.parametrize("before, number", [(print, signal.SIGHUP), (signal.SIG_IGN, 0)])
def test_a_hangup_is_a_request_to_stop_unless_nohup_has_it_ignored(before, number) -> None:
    kept = signal.signal(signal.SIGHUP, before)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, kept)
    assert interrupt.number == number
    assert not number or interrupt.exit_code == 129


@pytest.mark.slow
def test_a_closed_pipe_ends_what_is_shown_and_not_the_run(uninterrupted, tmp_path) -> None:
    """As in `penstock train ... 2>&1 | head -2`."""
    process = begin([*TRAIN, *sets(*SMALL)], tmp_path)
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(2)]
    process.stdout.close()
    assert process.wait(timeout=60) == 0, said
    assert_same_run(tmp_path / "run", uninterrupted)


def test_the_command_prints_a_summary_as_json_and_leaves_no_threads(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    before = threading.active_count()
    assert run(["train", str(DIGITS), "--json", *sets(*SMALL)]) == 0
    assert threading.active_count() == before
    summary = json.loads(capsys.readouterr().out)
    assert summary["run_folder"] == "runs/digits-1" and summary["steps"] == NUM_STEPS
    assert summary["finished"] is True and len(summary["stages"]) == 2


TWO = [*SMALL, "train.checkpoint_every=1", "pipeline.schedule=pipedream_2bw", "train.window=2"]
STASHED = [*SMALL, "pipeline.schedule=pipedream", "pipeline.partition=[4, 4]", "train.window=2"]
STASHED += ["optimizer.lr=0.001"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(TWO, id="pipedream_2bw", marks=pytest.mark.slow),
        pytest.param(STASHED, id="pipedream", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_bit_by_bit_from_where_a_window_ended(changes, tmp_path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    summary = start(DIGITS, changes, whole)
    assert summary.finished and summary.steps == NUM_STEPS
    stopped(read_recipe(DIGITS, changes), broken, 2)  # of windows of 2, 1, 2 and 1 batches
    layout = ["pipeline.recompute=never"]
    if changes is TWO:  # lags the same for every number of stages
        layout.append("pipeline.num_stages=3")
        saved = [path.name.removeprefix("step-") for path in RunFolder(whole).checkpoints()]
        assert saved == ["000002", "000003", "000005", "000006"]  # where windows end
    assert resume(broken, layout).finished
    assert_same_run(broken, whole)


@pytest.mark.slow
def test_windows_of_one_batch_are_synchronous_training(uninterrupted, tmp_path) -> None:
    window = tmp_path / "window"
    assert start(DIGITS, [*SMALL, "pipeline.schedule=pipedream_2bw"], window).finished
    lines = curve(uninterrupted)
    assert all(line.pop("gradient_norm") > 0 for line in lines if line["kind"] == "step")
    assert lines == curve(window), "a window knows no norm over all stages"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("train.max_grad_norm=1.0", "the norm over all stages is not known"),
        ("train.precision=float16", "has overflowed is not known"),
        ("train.average_decay=0.9", "average is taken when all weights are of one update"),
        ("pipeline.num_replicas=2", "wait for the gradients of all replicas"),
        ("pipeline.schedule=pipedream", "depends on its stage; list the layers"),
        ("pipeline.schedule=gpipe", "ends every batch with a flush"),
    ],
)
def test_what_cannot_be_as_asked_is_refused_with_the_reason(change: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        read_recipe(DIGITS, [*TWO, change])


def test_a_run_whose_weights_lag_cannot_go_on_with_another_lag(tmp_path: Path) -> None:
    folder = stopped(read_recipe(DIGITS, TWO), tmp_path / "run", 2)
    with pytest.raises(RecipeError, match=r"train\.window was 2 and cannot become 3"):
        resume(folder.path, ["train.window=3"])
    other = ["pipeline.schedule=pipedream", "pipeline.partition=[4, 4]"]
    with pytest.raises(RecipeError, match=r"pipeline\.schedule was"):
        resume(folder.path, other)
