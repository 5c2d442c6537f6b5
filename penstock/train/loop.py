"""The training loop: a run is what its recipe says, wherever and however often it is resumed."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from penstock.checkpoint import Saving, async_save_checkpoint, load_checkpoint
from penstock.clip import clip_grad_norm_
from penstock.data.sampler import batch_indices, epoch_order, num_batches
from penstock.data.shift import epoch_shifts, shift_images
from penstock.errors import CheckpointError
from penstock.mesh import Mesh
from penstock.types import Trace

from .build import (
    autocast,
    build_data,
    build_model,
    build_optimizer,
    build_pipeline,
    build_scaler,
)
from .display import Display
from .interrupt import Interrupt
from .layout import check_batches, make_mesh, replica_share
from .learning_rate import warmup_cosine
from .meter import Meter
from .position import Position
from .recipe import Recipe
from .run_folder import RunFolder


class Trainer:
    """Owns the model, its pipeline, its optimizer and the position of one run.

    In a mesh of processes each makes a trainer and calls it alike; `mesh` is by default the
    recipe's, in this process.

    Raises:
        PenstockError: the recipe asks for what cannot be built; nothing has run then.
    """

    def __init__(self, recipe: Recipe, mesh: Mesh | None = None) -> None:
        self.recipe = recipe
        self.mesh = mesh if mesh is not None else make_mesh(recipe)
        self.data = build_data(recipe)
        check_batches(recipe, len(self.data.train))
        self.model = build_model(recipe)
        share = self._share(min(recipe.train.batch_size, len(self.data.train)))
        self.pipe = build_pipeline(recipe, self.model, self.data.train.inputs[share], self.mesh)
        self.optimizer = build_optimizer(recipe, self.pipe)
        self.scaler = build_scaler(recipe, self.pipe)
        self.position = Position()
        self.meter = Meter(recipe.train.trace_every)
        self._epoch_data: tuple[int, Tensor, Tensor] | None = None
        self._saving: Saving | None = None

    def _share(self, num_samples: int) -> slice:
        """Give which samples of a mini-batch are this replica's."""
        section = self.recipe.pipeline
        return replica_share(
            num_samples, section.num_microbatches, section.num_replicas, self.mesh.replica
        )

    @property
    def steps_per_epoch(self) -> int:
        return num_batches(len(self.data.train), self.recipe.train.batch_size)

    @property
    def finished(self) -> bool:
        return self.position.epoch >= self.recipe.train.epochs

    def resume(self, folder: RunFolder, *, falls_back: bool = False) -> list[str]:
        """Stand where the newest checkpoint of `folder` stands; at the start if there is none.

        With `falls_back`, one that cannot be loaded is set aside for the one before it.

        Returns:
            What was set aside, and why.

        Raises:
            CheckpointError: it is damaged or of another model.
        """
        warnings = []
        while (newest := self._newest(folder)) is not None:
            try:
                self._load(newest)
                break
            except CheckpointError as error:
                if not falls_back:
                    raise CheckpointError(
                        f"{error}\nTo resume from the checkpoint before it, delete {newest}"
                    ) from None
                warnings.append(f"{newest} is set aside: {error}")
                folder.set_aside(newest)
        folder.remove_unfinished()
        folder.drop_metrics_after(self.position.step)
        return warnings

    def _newest(self, folder: RunFolder) -> Path | None:
        """Give the newest checkpoint, as rank 0 sees it."""
        found: Path | None = self.mesh.from_first(
            lambda: next(reversed(folder.checkpoints()), None), "for the newest checkpoint"
        )
        return found

    def _load(self, checkpoint: Path) -> None:
        state = load_checkpoint(checkpoint, self.pipe, self.optimizer)
        self.position = _position(state)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])

    def run(self, folder: RunFolder, display: Display, interrupt: Interrupt) -> None:
        """Train to the end, or until `interrupt` is wanted in any process; all is saved when it
        returns.
        """
        stopping = self._must_stop(interrupt)
        while not self.finished and not stopping:
            self._step(folder, display)
            if self.position.batch == self.steps_per_epoch:
                self._end_epoch(folder, display)
            stopping = self._must_stop(interrupt)
            due = self.position.step % self.recipe.train.checkpoint_every == 0
            if due or self.finished or stopping:
                self._save(folder)
        self._settle(folder)

    def _must_stop(self, interrupt: Interrupt) -> bool:
        """Agree with the other processes whether to end here; what one was told, all know then.

        A signal that comes during the agreement is for the next one: the others do not know of it.
        """
        number = self.mesh.highest(interrupt.number, "for the others to finish their step")
        interrupt.number = interrupt.number or number
        return number != 0

    def raise_if_wanted(self, interrupt: Interrupt) -> None:
        """End all processes if one of them should; for when there is nothing to save yet."""
        if self._must_stop(interrupt):
            raise KeyboardInterrupt

    def _step(self, folder: RunFolder, display: Display) -> None:
        inputs, targets, num_samples = self._batch()
        rate = self._set_learning_rate()
        full_batch = num_samples == self.recipe.train.batch_size
        self.pipe.trace = self.meter.choose_trace(full_batch=full_batch)
        start_s = time.perf_counter()
        loss = self._update(inputs, targets)
        took_s = time.perf_counter() - start_s
        timeline = self.pipe.last_timeline if self.pipe.trace is not Trace.OFF else None
        self.meter.add_step(took_s, num_samples, timeline)
        self.position = self.position.after_batch(loss, num_samples)
        if self.position.step % self.recipe.train.log_every == 0:
            self._log(folder, "step", {"loss": loss, "learning_rate": rate})
        display.show_step(self.position, self.meter)

    def _update(self, inputs: Tensor, targets: Tensor) -> float:
        """Run a step and move the weights; give the loss."""
        with autocast(self.recipe, self.pipe):
            loss = self.pipe.train_step(inputs, targets, loss_scale=self.scaler.get_scale())
        if self.recipe.train.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.pipe, self.recipe.train.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return float(loss)

    def _batch(self) -> tuple[Tensor, Tensor, int]:
        """Give this replica's inputs and targets at the position, and all replicas' samples."""
        epoch, train = self.position.epoch, self.data.train
        if self._epoch_data is None or self._epoch_data[0] != epoch:
            seed, shift = self.recipe.train.seed, self.recipe.data.max_shift
            shifts = epoch_shifts(len(train), seed, epoch, shift)
            self._epoch_data = (epoch, epoch_order(len(train), seed, epoch), shifts)
        _, order, shifts = self._epoch_data
        whole = batch_indices(order, self.position.batch, self.recipe.train.batch_size)
        own = whole[self._share(len(whole))]
        return shift_images(train.inputs[own], shifts[own]), train.targets[own], len(whole)

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
        """Give the share of test samples whose highest output is the right one.

        Each replica judges every D-th sample.  All make the same calls: where one has a sample
        less it takes the first one too, which does not count.
        """
        test, size = self.data.test, self.recipe.train.batch_size
        num_replicas = self.mesh.num_replicas
        own = torch.arange(len(test))[self.mesh.replica :: num_replicas]
        known = len(own)
        padding = -(-len(test) // num_replicas) - known
        own = torch.cat([own, torch.zeros(padding, dtype=own.dtype)])
        right = 0
        for chosen, counted in zip(
            own.split(size), torch.arange(len(own)).split(size), strict=True
        ):
            with autocast(self.recipe, self.pipe):
                outputs = self.pipe.eval_step(test.inputs[chosen])
            hits = outputs.argmax(dim=1) == test.targets[chosen]
            right += int((hits & (counted < known)).sum())
        of_all: list[int] = self.mesh.gather(right, "for the others to evaluate")
        return sum(of_all[:: self.mesh.num_stages if self.mesh.is_distributed else 1]) / len(test)

    def _log(self, folder: RunFolder, kind: str, values: Mapping[str, Any]) -> None:
        where = {"kind": kind, "step": self.position.step, "epoch": self.position.epoch}
        folder.append_metrics({**where, **values, "samples_per_s": self.meter.samples_per_s})

    def _save(self, folder: RunFolder) -> None:
        """Begin to save; training goes on beside it."""
        self._settle(folder)
        self._saving = async_save_checkpoint(
            folder.checkpoint_path(self.position.step),
            self.pipe,
            self.optimizer,
            position=asdict(self.position),
            recipe=self.recipe.model_dump(),
            scaler=self.scaler.state_dict(),
        )

    def _settle(self, folder: RunFolder) -> None:
        """Wait for the checkpoint that is being written, then delete those it replaces."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()
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
