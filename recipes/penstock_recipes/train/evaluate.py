"""Evaluate a checkpoint of a run, or predict with it; nothing is trained."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from penstock.mesh import num_processes

from .automatic import meet_by_plan
from .build import build_model
from .command import Request, check_fits, to_resume
from .display import say
from .loop import Trainer
from .run_folder import Which, open_existing
from .start import check_state
from .tasks import build_task
from .weights import fill, mean_weights, tensor_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The scores of a checkpoint."""

    checkpoint: Path
    epoch: int
    """Full epochs that it is trained."""
    step: int
    scores: Mapping[str, float]
    """By name, such as `test_accuracy`."""
    shown: Mapping[str, str]
    """The scores as text, by title."""

    def __str__(self) -> str:
        """Return the checkpoint, and a line for each score."""
        lines = (f"{title}: {text}" for title, text in self.shown.items())
        head = f"{self.checkpoint}, after epoch {self.epoch} and step {self.step}"
        return "\n".join([head, *lines])

    def to_json(self) -> str:
        """Write the scores as one line of JSON."""
        facts = {"checkpoint": str(self.checkpoint), "epoch": self.epoch, "step": self.step}
        return json.dumps({**self.scores, **facts})


def evaluate_run(request: Request, which: Which, console: Console) -> Evaluation:
    """Compute the scores of a checkpoint on the held-out samples, with any number of stages.

    Stages, replicas and shards are fitted to the number of processes, as on resume.

    Raises:
        RunFolderError: it is no run folder, or has no checkpoint.
        RecipeError: an override changes what the run computes.
        ConfigError: the data are not those of the run.
        CheckpointError: the checkpoint is damaged, or of another run.
        MeshError: the processes do not find each other.
    """
    assert request.run_folder is not None
    recipe, plan = to_resume(request, num_processes(), to="evaluate")
    check_fits(recipe, plan, num_processes())
    folder = open_existing(request.run_folder, writes=False)
    recipe, plan, met = meet_by_plan(recipe, plan)
    with met as mesh, mesh.reporting(), Trainer(recipe, mesh, resumes=True, plan=plan) as trainer:
        say(console, trainer.devices_text())
        task = trainer.task
        mesh.world.from_first(lambda: task.begin(folder.path), "to see that the data are the same")
        checkpoint = mesh.world.from_first(lambda: folder.chosen(which), "for the checkpoint")
        trainer.load(checkpoint)
        scores = trainer.evaluate()
        return Evaluation(
            checkpoint=checkpoint,
            epoch=trainer.position.epoch,
            step=trainer.position.step,
            scores=scores,
            shown={measure.title: measure.shown(scores) for measure in task.measures},
        )


def predict_by(
    run: Path, inputs: Sequence[str], which: Which, overrides: Sequence[str] = ()
) -> Iterator[str]:
    """Yield a text for each input, by the unsplit model of a checkpoint, on the CPU.

    Raises:
        RunFolderError, RecipeError, ConfigError, CheckpointError: as `evaluate_run`.
        PenstockError: an input cannot be read.
    """
    request = Request(None, overrides, run)
    recipe, _ = to_resume(request, 1, to="predict")
    folder = open_existing(run, writes=False)
    checkpoint = folder.chosen(which)
    check_state(checkpoint, recipe)
    task = build_task(recipe)
    task.begin(folder.path)
    model = build_model(recipe, task).eval()
    fill(model, mean_weights([checkpoint], tensor_names(model)))
    yield from task.predict(model, inputs)
