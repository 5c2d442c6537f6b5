"""The training loop: a run is what its recipe says, wherever and however often it is resumed."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from penstock.checkpoint import load_checkpoint, save_checkpoint
from penstock.data.sampler import batch_indices, epoch_order, num_batches
from penstock.data.shift import epoch_shifts, shift_images
from penstock.errors import CheckpointError
from penstock.types import Trace

from .build import build_data, build_model, build_optimizer, build_pipeline
from .display import Display
from .interrupt import Interrupt
from .learning_rate import warmup_cosine
from .meter import Meter
from .position import Position
from .recipe import Recipe
from .run_folder import RunFolder


class Trainer:
    """Owns the model, its pipeline, its optimizer and the position of one run.

    Raises:
        PenstockError: the recipe asks for what cannot be built; nothing has run then.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.data = build_data(recipe)
        self.model = build_model(recipe)
        example = self.data.train.inputs[: recipe.train.batch_size]
        self.pipe = build_pipeline(recipe, self.model, example)
        self.optimizer = build_optimizer(recipe, self.pipe)
        self.position = Position()
        self.meter = Meter(recipe.train.trace_every)
        self._epoch_data: tuple[int, Tensor, Tensor] | None = None

    @property
    def steps_per_epoch(self) -> int:
        return num_batches(len(self.data.train), self.recipe.train.batch_size)

    @property
    def finished(self) -> bool:
        return self.position.epoch >= self.recipe.train.epochs

    def resume(self, folder: RunFolder) -> None:
        """Stand where the newest checkpoint of `folder` stands; at the start if there is none.

        Raises:
            CheckpointError: it is damaged or of another model.
        """
        checkpoints = folder.checkpoints()
        if checkpoints:
            try:
                state = load_checkpoint(checkpoints[-1], self.pipe, self.optimizer)
                self.position = _position(state)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error}\nTo resume from the checkpoint before it, delete {checkpoints[-1]}"
                ) from None
        folder.drop_metrics_after(self.position.step)

    def run(self, folder: RunFolder, display: Display, interrupt: Interrupt) -> None:
        """Train to the end, or until `interrupt` is wanted; all is saved when it returns."""
        while not self.finished and not interrupt.wanted:
            self._step(folder, display)
            if self.position.batch == self.steps_per_epoch:
                self._end_epoch(folder, display)
            due = self.position.step % self.recipe.train.checkpoint_every == 0
            if due or self.finished or interrupt.wanted:
                self._save(folder)

    def _step(self, folder: RunFolder, display: Display) -> None:
        inputs, targets = self._batch()
        rate = self._set_learning_rate()
        full_batch = len(targets) == self.recipe.train.batch_size
        self.pipe.trace = self.meter.choose_trace(full_batch=full_batch)
        start_s = time.perf_counter()
        loss = float(self.pipe.train_step(inputs, targets))
        self.optimizer.step()
        self.optimizer.zero_grad()
        took_s = time.perf_counter() - start_s
        timeline = self.pipe.last_timeline if self.pipe.trace is not Trace.OFF else None
        self.meter.add_step(took_s, len(targets), timeline)
        self.position = self.position.after_batch(loss, len(targets))
        if self.position.step % self.recipe.train.log_every == 0:
            self._log(folder, "step", {"loss": loss, "learning_rate": rate})
        display.show_step(self.position, self.meter)

    def _batch(self) -> tuple[Tensor, Tensor]:
        """Give the inputs and targets at the position."""
        epoch, train = self.position.epoch, self.data.train
        if self._epoch_data is None or self._epoch_data[0] != epoch:
            seed, shift = self.recipe.train.seed, self.recipe.data.max_shift
            shifts = epoch_shifts(len(train), seed, epoch, shift)
            self._epoch_data = (epoch, epoch_order(len(train), seed, epoch), shifts)
        _, order, shifts = self._epoch_data
        chosen = batch_indices(order, self.position.batch, self.recipe.train.batch_size)
        return shift_images(train.inputs[chosen], shifts[chosen]), train.targets[chosen]

    def _set_learning_rate(self) -> float:
        section = self.recipe.learning_rate
        rate = warmup_cosine(
            self.position.step,
            num_steps=self.recipe.train.epochs * self.steps_per_epoch,
            warmup_steps=round(section.warmup_epochs * self.steps_per_epoch),
            peak=self.recipe.optimizer.lr,
            final_share=section.final_share,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _end_epoch(self, folder: RunFolder, display: Display) -> None:
        train_loss = self.position.mean_loss
        self.pipe.trace = Trace.OFF
        self.position = self.position.after_epoch(self.evaluate())
        accuracy = self.position.test_accuracy
        self._log(folder, "epoch", {"train_loss": train_loss, "test_accuracy": accuracy})
        display.show_epoch(self.position, self.meter, train_loss)

    def evaluate(self) -> float:
        """Give the share of test samples whose highest output is the right one."""
        test, size = self.data.test, self.recipe.train.batch_size
        right = 0
        for inputs, targets in zip(test.inputs.split(size), test.targets.split(size), strict=True):
            right += int((self.pipe.eval_step(inputs).argmax(dim=1) == targets).sum())
        return right / len(test)

    def _log(self, folder: RunFolder, kind: str, values: Mapping[str, Any]) -> None:
        where = {"kind": kind, "step": self.position.step, "epoch": self.position.epoch}
        folder.append_metrics({**where, **values, "samples_per_s": self.meter.samples_per_s})

    def _save(self, folder: RunFolder) -> None:
        path = folder.checkpoint_path(self.position.step)
        if path.exists():
            return
        save_checkpoint(
            path,
            self.pipe,
            self.optimizer,
            position=asdict(self.position),
            recipe=self.recipe.model_dump(),
        )
        folder.keep_newest(self.recipe.train.keep_checkpoints)

    def close(self) -> None:
        """End the pipeline's threads."""
        self.pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _position(state: Mapping[str, Any]) -> Position:
    if "position" not in state:
        raise CheckpointError(
            "the checkpoint was not saved by `penstock train`: it has no position"
        )
    return Position(**state["position"])
