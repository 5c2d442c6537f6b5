"""What becomes of the model's output on the stage that has it: a loss, or what the caller gets."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.model.entries import are_plain, detached
from penstock.model.pytree import flatten, tree_map, unflatten

from .boundary import check_classes, check_loss
from .devices import StageDevice
from .drawing import Drawing, LayerCall
from .notes import note_failure
from .run import Run
from .tape import Tape


@dataclass(frozen=True, slots=True)
class Ending:
    """Takes the outputs of a stage; the user's loss draws as layer number `loss_index`."""

    stage: int
    device: StageDevice
    drawing: Drawing
    loss_index: int

    def take(self, run: Run, tape: Tape, output: Any) -> None:
        """Note the output of a micro-batch for the caller, or its loss."""
        microbatch = tape.microbatch
        if run.loss is None:
            tape.output, structure = flatten(output)
            if not are_plain(tape.output):
                check_classes(tape.output, "leaves the last stage")
            tape.output_wants_grad = tuple([leaf.requires_grad for leaf in tape.output])
            run.outputs[microbatch] = unflatten(structure, [detached(t) for t in tape.output])
            return
        loss = self._loss(run, tape, output)
        weight = run.batch.weights[microbatch]
        if weight == 0:  # the mean over no real tokens is 0/0; it has no part in the batch's loss
            run.losses[microbatch] = torch.zeros_like(loss.detach())
            return
        if microbatch not in run.losses:  # a recompute has it already
            run.losses[microbatch] = loss.detach() * weight
        tape.loss = loss

    def _loss(self, run: Run, tape: Tape, output: Any) -> Tensor:
        """Compute the user's loss, with random numbers of its own if it draws any."""
        assert run.loss is not None
        target = run.batch.targets[tape.microbatch]
        if not isinstance(target, Tensor) or target.device != self.device.device:
            target = tree_map(lambda t: self.device.bring([t], None)[0], target)
        training = getattr(run.loss, "training", True)
        call = LayerCall(run, tape, self.loss_index, training)
        compute = partial(run.loss, output, target)
        try:
            is_silent = (self.loss_index, training) in self.drawing.silent
            loss: Tensor = compute() if is_silent else self.drawing.run(call, compute)
            if not (isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad):
                check_loss(loss, run.with_grad)
        except Exception as error:
            note_failure(error, self.stage, "the loss", tape.microbatch)
            raise
        return loss
