"""One stage at work: forward, recompute and backward of its layers on one micro-batch.

          ReceiveActivation                                     SendActivation
    peer ──► Activation ──► entries ──► layers ──► exported leaves ──► Activation ──► peer
                              [1]                     [2]
    peer ◄── Gradient ◄── caught by [1] ◄── one backward call from all of [2] ◄── Gradient ◄── peer

[1] are leaves of this stage's own autograd graph; [2] are its roots.  An exported value that
layers of this stage use as well is a root inside the graph: what arrives for it starts the
engine's own sum.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.dropout import _DropoutNd

from penstock.errors import BoundaryError, ConfigError, RecomputeError
from penstock.model.layers import MODEL_INPUT, Value, call, join_output
from penstock.model.pytree import Structure, flatten, tree_map, unflatten
from penstock.model.stages import StagePlan
from penstock.types import Trace

from .batch_norm import batch_norms, commit_statistics, separate_statistics
from .boundary import check_leaving, check_routes
from .devices import StageDevice
from .entries import faithful_copy, make_entry
from .memory import KeptBytes
from .notes import backward_of, next_node_number, note_failure
from .random_streams import (
    KeyedRandomness,
    RefuseRandomness,
    holds_generator,
    runs_and_draws,
    stream_key,
)
from .recompute import Repeatable
from .run import FROM_CALLER, Activation, Gradient, Kept, Run


class Stage:
    """Runs the layers of one stage; what it keeps between instructions lives in the `Run`."""

    def __init__(self, plan: StagePlan, device: torch.device, loss_index: int) -> None:
        self.plan = plan
        self.device = StageDevice(device)
        modules = tuple(step.module for step in plan.steps)
        self.batch_norms = batch_norms(modules)
        self._repeatable = Repeatable(modules, skip=self.batch_norms)
        self._kept_bytes = KeptBytes(plan.index, modules, computes_loss=bool(plan.output))
        self._loss_index = loss_index
        self._draws: dict[tuple[float, ...], bool] = {}
        self._own_generators = {s.index for s in plan.steps if holds_generator(s.module)}
        self._dropouts = {
            step.index: [m for m in step.module.modules() if isinstance(m, _DropoutNd)]
            for step in plan.steps
        }
        self._backward_is_pure = False
        self._drops_graph = False
        self._changes_input: dict[tuple[int, int], bool] = {}

    @property
    def index(self) -> int:
        return self.plan.index

    def forget_draws(self) -> None:
        """Look at every layer again before trusting that it draws no random numbers."""
        self._draws.clear()

    # -- what the instructions ask for --------------------------------------------------------

    def forward(self, run: Run, microbatch: int, keep_graph: bool) -> None:
        """Run the layers; leave behind the activations to send and what the backward needs."""
        kept = Kept(received=self._received(run, microbatch))
        self._drops_graph = run.with_grad and not keep_graph
        if self._drops_graph or self.batch_norms or run.trace is Trace.MEMORY:
            with ExitStack() as context:
                self._prepare(run, microbatch, kept, context)
                structures = self._run_layers(run, microbatch, kept)
        else:
            structures = self._run_layers(run, microbatch, kept)
        for peer, structure in structures.items():
            leaves = kept.exported[peer]
            run.leaving[self.index, microbatch][peer] = Activation(
                tuple(leaf.detach() for leaf in leaves),
                tuple(leaf.requires_grad for leaf in leaves),
                structure,
                self.device.mark(),
            )
        if run.with_grad:
            if not keep_graph:
                kept.entries, kept.exported, kept.output, kept.loss = {}, {}, [], None
            run.kept[self.index, microbatch] = kept
            self._kept_bytes.note_inputs(run, microbatch, kept)
            self._kept_bytes.sample(run)

    def _prepare(self, run: Run, microbatch: int, kept: Kept, context: ExitStack) -> None:
        """Enter what a forward needs around it."""
        if self.batch_norms:
            moments = run.moments[self.index]
            context.enter_context(separate_statistics(self.batch_norms, moments))
        if self._drops_graph:
            context.enter_context(saved_tensors_hooks(_drop, _never))
            kept.seen = context.enter_context(self._repeatable.remembered(kept.inputs))
        elif run.with_grad:
            self._kept_bytes.watch(run, microbatch, kept, context)

    def recompute(self, run: Run, microbatch: int) -> None:
        """Run the layers again on the same inputs, buffers and random streams; keep the graph."""
        try:
            self._recompute(run, microbatch)
        except RecomputeError as error:
            note_failure(error, self.index, "the recompute", microbatch)
            raise

    def _recompute(self, run: Run, microbatch: int) -> None:
        kept = run.kept[self.index, microbatch]
        assert kept.seen is not None
        with ExitStack() as context:
            if run.resumed:
                context.enter_context(run.caller.entered())
            if self.batch_norms:
                context.enter_context(separate_statistics(self.batch_norms, into=None))
            context.enter_context(self._repeatable.restored(kept.seen, kept.inputs))
            self._kept_bytes.watch(run, microbatch, kept, context)
            self._run_layers(run, microbatch, kept)
        self._kept_bytes.sample(run)

    def backward(self, run: Run, microbatch: int) -> None:
        """Run autograd once from all roots; leave behind the gradients to send; free the graph."""
        kept = run.kept.pop((self.index, microbatch))
        roots, gradients = self._roots(run, microbatch, kept)
        if roots:
            try:
                self._run_autograd(roots, gradients)
            except Exception as error:
                where = backward_of(error, self.plan.steps, kept.layer_marks)
                note_failure(error, self.index, where, microbatch)
                raise
        for peer, entries in kept.entries.items():
            found = tuple(entry.gradient for entry in entries)
            if peer == FROM_CALLER:
                run.input_gradients[microbatch] = found
            else:
                run.leaving_gradients[self.index, microbatch][peer] = Gradient(
                    found, self.device.mark()
                )
        self._kept_bytes.forget(run, microbatch)
        self._kept_bytes.sample(run)

    def commit_statistics(self, run: Run) -> None:
        """Move the BatchNorm running statistics by all micro-batches' moments; free those."""
        commit_statistics(run.moments.pop(self.index, {}))

    def bring_activation(self, activation: Activation) -> Activation:
        """Bring received values to this stage's device."""
        if not self.device.is_cuda and activation.event is None:
            return activation
        return Activation(
            tuple(self.device.bring(activation.leaves, activation.event)),
            activation.wants_grad,
            activation.structure,
        )

    # -- forward ------------------------------------------------------------------------------

    def _received(self, run: Run, microbatch: int) -> dict[int, Activation]:
        received = run.arrived.pop((self.index, microbatch), {})
        if self.plan.reads_input:
            leaves, structure = flatten((run.inputs[microbatch],))
            received[FROM_CALLER] = Activation(
                tuple(self.device.bring(leaves, None)),
                tuple(t.requires_grad for t in leaves),
                structure,
            )
        return received

    def _run_layers(self, run: Run, microbatch: int, kept: Kept) -> dict[int, Structure]:
        """Run all layers on what was received; note roots and loss in `kept`."""
        values, given = self._enter(run, kept)
        kept.layer_marks = []
        for step, dead in zip(self.plan.steps, self.plan.dead_after, strict=True):
            kept.layer_marks.append(next_node_number())
            arguments = [values[v] for v in step.inputs]
            try:
                run_layer = partial(call, step, arguments)
                values.update(
                    self._drawing(run, microbatch, step.index, step.module.training, run_layer)
                )
            except Exception as error:
                note_failure(error, self.index, f"layer {step.label}", microbatch)
                raise
            for value in dead:
                del values[value]
        self._check_inputs_unchanged(given)
        structures = self._export(values, kept, microbatch)
        if self.plan.output:
            self._finish(run, microbatch, kept, join_output([values[v] for v in self.plan.output]))
        return structures

    def _export(
        self, values: dict[Value, Any], kept: Kept, microbatch: int
    ) -> dict[int, Structure]:
        """Gather the leaves that other stages need; give the structures around them."""
        structures = {}
        try:
            for peer, exported in self.plan.exports.items():
                leaves, structure = flatten(tuple(values[v] for v in exported))
                check_leaving(leaves, structure, self.index, peer)
                kept.exported[peer], structures[peer] = leaves, structure
            if len(structures) > 1:
                check_routes(kept.exported, self.index)
        except BoundaryError as error:
            note_failure(error, self.index, f"layer {self.plan.steps[-1].label}", microbatch)
            raise
        return structures

    def _enter(self, run: Run, kept: Kept) -> tuple[dict[Value, Any], "_Given"]:
        """Make leaves of this stage's own graph from what arrived, and name their values.

        A layer that changes its input in place gets a copy; every input is copied once, to find
        out.
        """
        values: dict[Value, Any] = {}
        given: _Given = []
        for peer, activation in kept.received.items():
            entries, inside = [], []
            for place, tensor in enumerate(activation.leaves):
                entry = make_entry(tensor, run.with_grad and activation.wants_grad[place])
                entries.append(entry)
                copied = run.with_grad and self._changes_input.get((peer, place), True)
                inside.append(faithful_copy(entry.tensor) if copied else entry.tensor)
                if run.with_grad:
                    given.append(((peer, place), inside[-1], inside[-1]._version, copied))
            kept.entries[peer] = entries
            names = (MODEL_INPUT,) if peer == FROM_CALLER else self.plan.imports[peer]
            values.update(zip(names, unflatten(activation.structure, inside), strict=True))
        return values, given

    def _check_inputs_unchanged(self, given: "_Given") -> None:
        for key, tensor, version, copied in given:
            changed = tensor._version != version
            self._changes_input[key] = self._changes_input.get(key, False) or changed
            if changed and not copied:
                raise RecomputeError(
                    f"a layer of stage {self.index} changed its input in place, which it did not "
                    "do before; the value its backward needs is gone. Zero the gradients and run "
                    "the step again: from now on the stage works on a copy"
                )

    def _drawing(
        self, run: Run, microbatch: int, layer: int, training: bool, function: Callable[[], Any]
    ) -> Any:
        """Run a layer so that it draws from its own stream; plainly if it draws nothing.

        What was seen of a layer holds for its mode and its dropout probabilities: a schedule may
        raise one from 0.
        """
        known = (layer, training, *(m.p for m in self._dropouts.get(layer, ())))
        draws = self._draws.get(known)
        if draws is False or (draws is None and not training and run.trusts_evaluation):
            return function()
        key = stream_key(run.seed, run.phase, run.step, layer, microbatch)
        if draws is None and layer not in self._own_generators:
            result, self._draws[known] = runs_and_draws(key, function, self.device.device)
            return result
        with KeyedRandomness(key, repeatable=self._drops_graph):
            return function()

    def _finish(self, run: Run, microbatch: int, kept: Kept, output: Any) -> None:
        if run.loss is None:
            kept.output, structure = flatten(output)
            kept.output_wants_grad = tuple(leaf.requires_grad for leaf in kept.output)
            run.outputs[microbatch] = unflatten(structure, [leaf.detach() for leaf in kept.output])
            return
        target = tree_map(lambda t: self.device.bring([t], None)[0], run.targets[microbatch])
        run_loss = partial(run.loss, output, target)
        try:
            loss = self._drawing(run, microbatch, self._loss_index, True, run_loss)
            _check_loss(loss, run.with_grad)
        except Exception as error:
            note_failure(error, self.index, "the loss", microbatch)
            raise
        weight = run.weights[microbatch]
        if weight == 0:  # the mean over no real tokens is 0/0; it has no part in the batch's loss
            run.losses[microbatch] = torch.zeros_like(loss.detach())
            return
        run.losses[microbatch] = loss.detach() * weight
        kept.loss = loss

    # -- backward -----------------------------------------------------------------------------

    def _roots(self, run: Run, microbatch: int, kept: Kept) -> tuple[list[Tensor], list[Tensor]]:
        """Pair everything that left the stage with the gradient that came back for it."""
        arrived = run.arrived_gradients.pop((self.index, microbatch), {})
        pairs: list[tuple[Tensor, Tensor | None]] = []
        for peer, leaves in kept.exported.items():
            gradient = arrived[peer]
            pairs += zip(leaves, self.device.bring(gradient.leaves, gradient.event), strict=True)
        if kept.output:
            found = run.output_gradients[microbatch]
            pairs += zip(kept.output, self.device.bring(found, None), strict=True)
        if kept.loss is not None:
            pairs.append((kept.loss, torch.full_like(kept.loss, run.weights[microbatch])))
        live = [(root, g) for root, g in pairs if g is not None and root.requires_grad]
        return [root for root, _ in live], [g for _, g in live]

    def _run_autograd(self, roots: list[Tensor], gradients: list[Tensor]) -> None:
        if self._backward_is_pure or not (any(self._draws.values()) or self._own_generators):
            torch.autograd.backward(roots, gradients)
            return
        with RefuseRandomness():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            torch.autograd.backward(roots, gradients)
        self._backward_is_pure = True


_Given = list[tuple[tuple[int, int], Tensor, int, bool]]
"""((peer, place), tensor given to the layers, its version then, whether it is a copy)."""


def _check_loss(loss: Any, with_grad: bool) -> None:
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        got = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        raise ConfigError(
            f"the loss function returned {got}; it must reduce a micro-batch to one number (a "
            "tensor of shape ()). Take its mean and use Reduction.MEAN, or its sum and use "
            "Reduction.SUM"
        )
    if with_grad and not loss.requires_grad:
        raise ConfigError(
            "the loss depends on no parameter that requires grad, so there is nothing to train; "
            "check frozen parameters, .detach() and torch.no_grad() in the model and the loss"
        )


def _drop(tensor: Tensor) -> None:
    """Save nothing: the graph of this forward is never used."""


def _never(nothing: None) -> Tensor:
    raise AssertionError("a dropped graph was used")
