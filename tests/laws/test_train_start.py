"""Runs that start from the weights of another, averages that judge, and learning rates."""

import io
import math
import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from penstock.errors import CheckpointError
from penstock_recipes.errors import RecipeError
from penstock_recipes.recipe.optimizer_sections import Cosine, Exponential
from penstock_recipes.recipe.read import read_recipe
from penstock_recipes.train.command import Request, start_run
from penstock_recipes.train.interrupt import Interrupt
from penstock_recipes.train.learning_rate import learning_rate, warmup_cosine
from penstock_recipes.train.loop import Trainer
from penstock_recipes.train.run_folder import RunFolder
from tests.digits import DIGITS, SMALL
from tests.runs import resume, start, stopped

ONE_EPOCH = [*SMALL, "train.epochs=1", "train.average_decay=0.5", "learning_rate.warmup_epochs=0"]
ONE_EPOCH += ["train.checkpoint_every=1", "train.keep_checkpoints=9"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert start(DIGITS, ONE_EPOCH, folder).finished
    return folder


def test_all_but_the_new_layers_are_the_averages_of_the_other_run(finished: Path) -> None:
    given = [f"start.checkpoint={finished}", 'start.new_layers=["head"]', "data.labels=parity"]
    checkpoint = RunFolder(finished).checkpoints()[-1]
    saved = load_file(checkpoint / "model.safetensors")
    averages = load_file(checkpoint / "optimizer.safetensors")
    with Trainer(read_recipe(DIGITS, [*ONE_EPOCH, *given])) as trainer:
        found = trainer.pipe.state_dict()
    assert found["head.weight"].shape[0] == 2
    for name, tensor in found.items():
        if not name.startswith("head."):
            layer, _, kind = name.rpartition(".")
            is_statistic = kind.startswith("running")
            key = f"{layer}.weight.average_{kind}" if is_statistic else f"{name}.average"
            assert (key in averages) == (kind != "num_batches_tracked"), name
            assert torch.equal(tensor, averages.get(key, saved[name])), name
            assert key not in averages or not torch.equal(averages[key], saved[name]), name


@pytest.mark.parametrize(
    "changes, message",
    [
        (["data.labels=parity"], r"head.weight is \[10, 4\] there, \[2, 4\] in the model"),
        (["model.width=5"], "name what begins anew in start.new_layers"),
        (['start.new_layers=["tail"]'], 'new_layers has "tail", and the model has no such'),
        (["data.seed=1"], "data.seed = 1 holds out other samples than the 0 of"),
        (["start.checkpoint=none"], "does not exist; give the folder of a finished run"),
        (["start.checkpoint=", 'start.new_layers=["head"]'], r"there is no start\.checkpoint"),
    ],
)
def test_what_does_not_fit_is_named(finished: Path, changes: list[str], message: str) -> None:
    recipe = read_recipe(DIGITS, [*ONE_EPOCH, f"start.checkpoint={finished}", *changes])
    with pytest.raises((CheckpointError, RecipeError), match=message):
        Trainer(recipe)


FINE_TUNED = ('start.new_layers=["head"]', "data.labels=parity")


def test_a_fine_tuned_run_without_a_sound_checkpoint_begins_with_the_same_weights(
    finished: Path, tmp_path: Path
) -> None:
    recipe = read_recipe(DIGITS, [*ONE_EPOCH, f"start.checkpoint={finished}", *FINE_TUNED])
    folder = stopped(recipe, tmp_path / "run", 1)
    (folder.checkpoints()[-1] / "model.safetensors").write_bytes(b"")
    with Trainer(recipe) as trainer:
        expected = {name: t.clone() for name, t in trainer.pipe.state_dict().items()}
    with Trainer(recipe, resumes=True) as trainer:
        said, found = trainer.resume(folder, falls_back=True), trainer.pipe.state_dict()
    assert trainer.position.step == 0
    assert "is set aside" in said[0] and said[1].endswith("the run begins again at step 0")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.slow
def test_a_fine_tuned_run_begins_again_with_the_checkpoint_it_began_with_or_not_at_all(
    finished: Path, tmp_path: Path
) -> None:
    """The other run has gone on meanwhile; then its old checkpoint changes."""
    source = tmp_path / "source"
    shutil.copytree(finished, source)
    changes = [*ONE_EPOCH, f"start.checkpoint={source}", *FINE_TUNED]
    whole = tmp_path / "whole"
    assert start(DIGITS, changes, whole).finished
    folder = stopped(read_recipe(DIGITS, changes), tmp_path / "run", 1)
    shutil.rmtree(folder.checkpoints()[-1])
    begun_from = RunFolder(source).checkpoints()[-1]
    shutil.copytree(begun_from.with_name("step-000001"), begun_from.with_name("step-000009"))
    assert resume(folder.path).finished
    ours, theirs = (
        load_file(RunFolder(f).checkpoints()[-1] / "model.safetensors")
        for f in (folder.path, whole)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    shutil.rmtree(folder.path / "checkpoints")
    shutil.rmtree(begun_from)
    with pytest.raises(CheckpointError, match=r"step-000003, are gone or not the same any more"):
        resume(folder.path)
    shutil.copytree(begun_from.with_name("step-000001"), begun_from)
    with pytest.raises(CheckpointError, match=r"step-000003, are gone or not the same any more"):
        resume(folder.path)
    assert list(folder.read_metrics())  # nothing was lost


def test_a_run_is_judged_by_its_averages(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    with Trainer(read_recipe(DIGITS, ONE_EPOCH)) as trainer:
        trainer.resume(RunFolder(finished, writes=False))
        before = {n: t.clone() for n, t in trainer.pipe.state_dict().items()}
        tally = trainer.task.tally

        def noted(outputs: Tensor, targets: Tensor) -> Tensor:
            seen.append(outputs)
            return tally(outputs, targets)

        monkeypatch.setattr(trainer.task, "tally", noted)
        assert trainer.evaluate() == dict(trainer.position.scores)
        assert trainer._average is not None
        inputs, _ = next(trainer.task.tests(range(trainer.task.num_test)))
        with trainer._average.in_place():
            of_averages = trainer.pipe.eval_step(inputs)
        of_newest = trainer.pipe.eval_step(inputs)
        assert torch.equal(torch.cat(seen), of_averages)
        assert not torch.equal(of_averages, of_newest)
        assert all(torch.equal(before[n], t) for n, t in trainer.pipe.state_dict().items())


PEAK = 0.3


def rates(warmup_steps: int, final_share: float = 0.0) -> list[float]:
    """Give the learning rates of 100 steps, and what the step after the last would have."""
    return [
        warmup_cosine(
            step, num_steps=100, warmup_steps=warmup_steps, peak=PEAK, final_share=final_share
        )
        for step in range(101)
    ]


@pytest.mark.parametrize("warmup_steps", [0, 1, 10, 99])
def test_it_reaches_the_peak_at_the_end_of_the_warm_up_and_only_falls_then(warmup_steps) -> None:
    rising, falling = rates(warmup_steps)[:warmup_steps], rates(warmup_steps)[warmup_steps:]
    assert falling[0] == PEAK and all(a > b for a, b in pairwise(falling))
    assert rising == pytest.approx([PEAK * (n + 1) / warmup_steps for n in range(warmup_steps)])


@pytest.mark.parametrize("final_share", [0.0, 0.1, 1.0])
def test_it_ends_at_its_final_share(final_share: float) -> None:
    assert rates(10, final_share)[-1] == pytest.approx(PEAK * final_share)


@pytest.mark.parametrize("section", [Cosine, partial(Exponential, name="exponential")])
@pytest.mark.parametrize("warmup_epochs", [2, 2.5, 7])
def test_a_warm_up_longer_than_the_run_is_shortened_to_it(section, warmup_epochs) -> None:
    found = [
        learning_rate(
            section(warmup_epochs=warmup_epochs), step, peak=PEAK, steps_per_epoch=5, epochs=2
        )
        for step in range(10)
    ]
    assert found == pytest.approx([PEAK * (n + 1) / 10 for n in range(10)])


def test_a_step_more_than_was_reckoned_with_has_a_learning_rate_too() -> None:
    """Epochs of parallel text differ in steps, so a run may have more than the first one says."""
    section = Cosine(warmup_epochs=2, final_share=0.5)
    assert learning_rate(section, 10, peak=PEAK, steps_per_epoch=5, epochs=2) == PEAK


def test_a_run_says_that_its_warm_up_is_shortened(tmp_path: Path) -> None:
    said, changes = io.StringIO(), [*SMALL, "train.epochs=1"]
    console = Console(file=said)
    assert start_run(Request(DIGITS, changes, tmp_path / "run"), console, Interrupt()).finished
    assert "warmup_epochs = 2 is not less than train.epochs = 1" in said.getvalue()


def test_halfway_down_the_cosine_is_half_the_peak() -> None:
    assert math.isclose(rates(0)[50], PEAK / 2)
