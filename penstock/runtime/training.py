"""Training steps of a pipeline: one with a flush behind it, or several without."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.schedules.lower import Mode

from .abstract_pipeline import AbstractPipeline
from .asynchronous import (
    Pair,
    Updating,
    as_pairs,
    check_steps_alone,
    check_updating,
    cut_all,
    losses,
    run_window,
)
from .microbatches import check_loss_scale, check_targets
from .module_form import accumulate_into_inputs
from .run import Run


class AbstractTraining(AbstractPipeline):
    """Base of `Pipeline`: what its training steps do."""

    def _train(self, inputs: Any, targets: Any, loss_scale: float) -> Tensor:
        """Run one synchronous step, as `Pipeline.train_step` says."""
        self._check_can_train("train_step")
        if self.plan.schedule.is_asynchronous:
            raise ConfigError(
                f"schedule={self.plan.schedule!r} updates the weights while it runs; give the "
                "optimizer and several batches to pipe.train_steps(batches, optimizer), or use a "
                "synchronous schedule"
            )
        check_targets(targets)
        with self._engine.one_at_a_time(), self._engine.reporting():
            scale = check_loss_scale(loss_scale)
            call = replace(self._wanted, trains=True, loss_scale=scale, trace=self._trace)
            batch = self._engine.splitter.cut(inputs, targets, call)
            self._balance_by(batch.inputs[0])
            engine = self._engine
            run = engine.new_run(batch, "train", self.step, with_grad=True)
            run.loss, run.loss_scale = engine.loss, scale
            self.step += 1
            engine.drive(run, Mode.TRAIN)
            self._note(run)
            loss = engine.splitter.loss(run.losses)
        if run.input_gradients:
            accumulate_into_inputs(inputs, run)
        return loss

    def _train_all(self, batches: Iterable[Pair], updating: Updating) -> Tensor:
        """Train on mini-batches and update the weights, as `Pipeline.train_steps` says."""
        check_updating(updating, self.parameters())
        batches = as_pairs(batches)
        if not self.plan.schedule.is_asynchronous:
            return self._train_one_by_one(batches, updating)
        self._check_can_train("train_steps")
        for _, targets in batches:
            check_targets(targets)
        with self._engine.one_at_a_time(), self._engine.reporting():
            call = replace(self._wanted, trains=True, trace=self._trace)
            cut = cut_all(self._engine, batches, call)
            self._balance_by(cut[0].inputs[0])
            engine, step = self._engine, self.step
            self.step += len(cut)
            run = run_window(engine, cut, step, updating)
            self._note(run)
            return losses(engine, cut, run)

    def _train_one_by_one(self, batches: Sequence[Pair], updating: Updating) -> Tensor:
        check_steps_alone(updating, len(batches))
        found = []
        for inputs, targets in batches:
            found.append(self._train(inputs, targets, 1.0))
            updating.optimizer.step()
            updating.optimizer.zero_grad()
            if updating.lr_scheduler is not None:
                updating.lr_scheduler.step()
        return torch.stack(found)

    def _note(self, run: Run) -> None:
        self._record, self._timeline = self._engine.record(run, Mode.TRAIN), None

    def _check_can_train(self, call: str) -> None:
        if self._engine.loss is None:
            raise ConfigError(
                f"{call} needs a loss; give Pipeline(..., loss=...), or use pipe(inputs)"
            )
        if not torch.is_grad_enabled():
            raise ConfigError(
                f"{call} was called under torch.no_grad(); use eval_step, or leave that block"
            )
