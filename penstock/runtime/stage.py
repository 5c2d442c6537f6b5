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
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import BoundaryError, ConfigError, RecomputeError
from penstock.model.copies import faithful_copy, no_leaf
from penstock.model.entries import detached, lasts, like, make_entry, mark_lasting
from penstock.model.pytree import flatten, tree_map, unflatten
from penstock.model.stage_plan import MODEL_INPUT, StagePlan, Step, Value, join_output
from penstock.torch_private import next_node_number
from penstock.transport.payload import Activation, Gradient, check_still_as_sent, version_of
from penstock.types import Trace

from .aliases import find_aliases
from .backward_pass import BackwardPass
from .batch_norm import batch_norms, commit_statistics, separate_statistics
from .boundary import (
    check_classes,
    check_leaving,
    check_loss,
    check_routes,
)
from .changes import Changes
from .devices import StageDevice
from .drawing import Drawing, LayerCall
from .leaves import claim_leaves
from .memory import KeptBytes
from .notes import backward_of, note_failure
from .recompute import Repeatable, Witness, dropping_graph
from .replicas import Replicas
from .run import FROM_CALLER, Given, Kept, Run
from .tied_sums import hold_back


class Stage:
    """Runs the layers of one stage; what it keeps between instructions lives in the `Run`.

    `loss` is the user's loss where this stage computes it: as a module it may hold state too.
    `replicas` are the stage's twins elsewhere, if there are any.
    """

    def __init__(
        self,
        plan: StagePlan,
        device: torch.device,
        loss_index: int,
        loss: Any = None,
        replicas: Replicas | None = None,
    ) -> None:
        self.plan = plan
        self._replicas = replicas
        self.device = StageDevice(device)
        layers = [(step.index, step.module) for step in plan.steps]
        if isinstance(loss, nn.Module):
            layers.append((loss_index, loss))
        modules = tuple(module for _, module in layers)
        self._modules = modules
        self.batch_norms = batch_norms(modules)
        self._repeatable = Repeatable(modules, skip=self.batch_norms)
        self._kept_bytes = KeptBytes(plan.index, modules, computes_loss=bool(plan.output))
        self._loss_index = loss_index
        self._drawing = Drawing(layers, device)
        self._changes = Changes(plan.index)
        self._backward_pass = BackwardPass(plan.index, modules, self.batch_norms, device)
        self._compares_recomputes = True

    @property
    def index(self) -> int:
        return self.plan.index

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters that are here now, the loss's included; each once."""
        return list(dict.fromkeys(p for m in self._modules for p in m.parameters()))

    @property
    def buffers(self) -> list[Tensor]:
        """All buffers that are here now; each once."""
        return list(dict.fromkeys(b for m in self._modules for b in m.buffers()))

    def forget(self, error: BaseException) -> None:
        """Forget what was seen of the layers: how they draw, whether they change their input."""
        self._drawing.forget(error)
        self._changes.forget()

    def check_norms(self) -> None:
        """Refuse BatchNorm layers that were put in, or taken out, since the stage was made.

        Raises:
            ConfigError: there is one.
        """
        if batch_norms(self._modules) != self.batch_norms:
            raise ConfigError(
                f"stage {self.index} was made with {len(self.batch_norms)} BatchNorm layers, and "
                "others are there now, whose running statistics would move more than once per "
                "mini-batch; make the pipeline after the last change of the model's layers"
            )

    # -- what the instructions ask for --------------------------------------------------------

    def forward(self, run: Run, microbatch: int, keep_graph: bool) -> None:
        """Run the layers; leave behind the activations to send and what the backward needs."""
        kept = Kept(self._received(run, microbatch), run.with_grad and not keep_graph)
        if kept.graph_dropped or self.batch_norms or run.trace is Trace.MEMORY:
            leaving = self._prepared_forward(run, microbatch, kept)
        else:
            leaving = self._run_layers(run, microbatch, kept)
        run.leaving[self.index, microbatch].update(leaving)
        if not run.with_grad:
            return
        if kept.graph_dropped:
            if microbatch == 0 and self._compares_recomputes:
                kept.witness = Witness.among(kept.results)
            kept.entries, kept.exported, kept.output, kept.loss = {}, {}, [], None
        run.kept[self.index, microbatch] = kept
        self._kept_bytes.note_inputs(run, microbatch, kept)
        self._kept_bytes.sample(run)

    def _prepared_forward(self, run: Run, microbatch: int, kept: Kept) -> dict[int, Activation]:
        """Run the layers with what recomputation, BatchNorm and tracing need around them."""
        with ExitStack() as context:
            if kept.graph_dropped:
                kept.seen = self._repeatable.look(kept.inputs)
                context.enter_context(dropping_graph())
            elif run.with_grad:
                self._kept_bytes.watch(run, microbatch, kept, context)
            if self.batch_norms:
                in_checkpoint = context.enter_context(
                    separate_statistics(self.batch_norms, run.moments[self.index])
                )
            leaving = self._run_layers(run, microbatch, kept)
        if self.batch_norms:
            kept.reruns_in_backward |= bool(in_checkpoint)
        if kept.seen is not None:
            self._repeatable.note_changes(kept.seen)
        return leaving

    def recompute(self, run: Run, microbatch: int) -> None:
        """Run the layers again on the same inputs, buffers and random streams; keep the graph."""
        kept = run.kept[self.index, microbatch]
        try:
            self._recompute(run, microbatch, kept)
            if kept.witness is not None:
                kept.witness.compare(kept.results)
                self._compares_recomputes = not self.device.is_cuda  # it has to be waited for
                kept.witness = None
        except RecomputeError as error:
            note_failure(error, self.index, "the recompute", microbatch)
            raise

    def _recompute(self, run: Run, microbatch: int, kept: Kept) -> None:
        assert kept.seen is not None
        with ExitStack() as context:
            if run.resumed:
                context.enter_context(run.caller.entered())
            context.callback(self._repeatable.put_back(kept.seen, kept.inputs))
            self._kept_bytes.watch(run, microbatch, kept, context)
            if self.batch_norms:
                context.enter_context(separate_statistics(self.batch_norms, into=None))
            self._run_layers(run, microbatch, kept)
        self._kept_bytes.sample(run)

    def backward(self, run: Run, microbatch: int) -> None:
        """Run autograd once from all roots; leave behind the gradients to send; free the graph."""
        kept = run.kept.pop((self.index, microbatch))
        roots, gradients = self._roots(run, microbatch, kept)
        if roots:
            if self.plan.decides or self.index not in run.stages_claimed:
                run.stages_claimed.add(self.index)
                claim_leaves(run, self.index, roots, kept.entry_tensors)
            try:
                self._backward_pass.run(run, microbatch, kept, roots, gradients)
            except Exception as error:
                note_failure(error, self.index, backward_of(error, kept.layer_marks), microbatch)
                raise
        for peer, entries in kept.entries.items():
            found = tuple(entry.gradient for entry in entries)
            check_classes(found, f"is a gradient that stage {self.index} found")
            if run.sums_tied and not self.plan.decides:  # else a place may be another weight's
                edge, lasting = (self.index, peer), kept.received[peer].lasting
                found = hold_back(run, edge, microbatch, found, lasting)
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
        moments = run.moments.pop(self.index, {})
        if self._replicas is not None and self._replicas.pools_statistics:
            moments = self._replicas.pool(moments, self.batch_norms)
        commit_statistics(moments)

    def reduce_gradients(self, run: Run) -> None:
        """Begin to add up the gradients over all replicas; `Engine.drive` waits for the sums."""
        assert self._replicas is not None
        self._replicas.begin(self.parameters)

    def bring_activation(self, activation: Activation) -> Activation:
        """Bring received values to this stage's device."""
        if not self.device.is_cuda and activation.event is None:
            return activation
        here = tuple(self.device.bring(activation.leaves, activation.event))
        versions = tuple(
            version if new is old else version_of(new)
            for new, old, version in zip(here, activation.leaves, activation.versions, strict=True)
        )
        return replace(activation, leaves=here, versions=versions, event=None)

    # -- forward ------------------------------------------------------------------------------

    def _received(self, run: Run, microbatch: int) -> dict[int, Activation]:
        received = run.arrived.pop((self.index, microbatch), {})
        if self.plan.reads_input:
            batch, structure = flatten((run.inputs[microbatch],))
            leaves = batch
            if not run.with_grad:  # layers may change them; each has a version of its own then
                shared = self.plan.shares_input
                leaves = [faithful_copy(leaf) if shared else leaf.data for leaf in batch]
            received[FROM_CALLER] = Activation(
                tuple(self.device.bring(leaves, None)),
                tuple(t.requires_grad for t in leaves),
                structure,
                tuple(map(version_of, leaves)),
                find_aliases({FROM_CALLER: batch}).get(FROM_CALLER, frozenset()),
            )
        return received

    def _run_layers(self, run: Run, microbatch: int, kept: Kept) -> dict[int, Activation]:
        """Run all layers on what was received; note roots and loss in `kept`."""
        values, given = self._enter(run, kept)
        kept.layer_marks = []

        def perform(step: Step, function: Callable[[], Any]) -> Any:
            kept.layer_marks.append((next_node_number(), step))
            this_call = LayerCall(run, microbatch, step.index, step.module.training, kept)
            try:
                return self._drawing.run(this_call, function)
            except Exception as error:
                note_failure(error, self.index, f"layer {step.label}", microbatch)
                raise

        self.plan.run(values, perform)
        self._changes.check(kept, given, with_grad=run.with_grad)
        leaving = self._export(values, given, kept, microbatch)
        if self.plan.output:
            self._finish(run, microbatch, kept, join_output([values[v] for v in self.plan.output]))
        return leaving

    def _export(
        self, values: dict[Value, Any], given: "list[Given]", kept: Kept, microbatch: int
    ) -> dict[int, Activation]:
        """Gather the leaves that other stages need; give the activations to send."""
        structures = {}
        try:
            for peer, exported in self.plan.exports.items():
                leaves, structure = flatten(tuple(values[v] for v in exported))
                check_leaving(leaves, structure, self.index, peer, any_shape=self.plan.any_shape)
                kept.exported[peer], structures[peer] = leaves, structure
            if len(structures) > 1:
                check_routes(kept.exported, self.index)
        except BoundaryError as error:
            note_failure(error, self.index, f"layer {self.plan.steps[-1].label}", microbatch)
            raise
        aliases = find_aliases(kept.exported, (g.tensor for g in given if g.is_alias))
        return {
            peer: Activation(
                tuple(map(detached, leaves)),
                tuple(leaf.requires_grad for leaf in leaves),
                structures[peer],
                tuple(map(version_of, leaves)),
                aliases.get(peer, frozenset()),
                self.device.mark(),
                frozenset([place for place, leaf in enumerate(leaves) if lasts(leaf)]),
            )
            for peer, leaves in kept.exported.items()
        }

    def _enter(self, run: Run, kept: Kept) -> tuple[dict[Value, Any], "list[Given]"]:
        """Make leaves of this stage's own graph from what arrived, and name their values.

        A layer that changes its input in place gets a copy; every input is copied once, to find
        out.
        """
        values: dict[Value, Any] = {}
        given: list[Given] = []
        caches = run.with_grad and torch.is_autocast_enabled(self.device.device.type)
        for peer, activation in kept.received.items():
            kept.entries[peer], inside = [], []
            for place, tensor in enumerate(activation.leaves):
                if peer != FROM_CALLER:
                    check_still_as_sent(tensor, activation.versions[place], peer)
                entry = make_entry(tensor, run.with_grad and activation.wants_grad[place])
                kept.entries[peer].append(entry)
                lasts_on = place in activation.lasting
                key, alias = (peer, place), place in activation.aliases
                copied = run.with_grad and self._changes.copies(key, lasts=lasts_on)
                value = faithful_copy(entry.tensor) if copied else entry.tensor
                if caches and not copied and not lasts_on:
                    value = no_leaf(value)
                inside.append(like(value, tensor))
                if lasts_on:
                    mark_lasting(inside[-1])
                elsewhere = peer != FROM_CALLER or self.plan.shares_input
                if run.with_grad or (alias and elsewhere):
                    sent = entry.tensor
                    before = None if run.with_grad else sent.clone()
                    given.append(Given(key, value, version_of(value), copied, alias, sent, before))
            names = (MODEL_INPUT,) if peer == FROM_CALLER else self.plan.imports[peer]
            values.update(zip(names, unflatten(activation.structure, inside), strict=True))
        return values, given

    def _finish(self, run: Run, microbatch: int, kept: Kept, output: Any) -> None:
        if run.loss is None:
            kept.output, structure = flatten(output)
            check_classes(kept.output, "leaves the last stage")
            kept.output_wants_grad = tuple(leaf.requires_grad for leaf in kept.output)
            run.outputs[microbatch] = unflatten(structure, list(map(detached, kept.output)))
            return
        target = run.targets[microbatch]
        if not isinstance(target, Tensor) or target.device != self.device.device:
            target = tree_map(lambda t: self.device.bring([t], None)[0], target)
        run_loss = partial(run.loss, output, target)
        try:
            loss = self._drawing.run(
                LayerCall(
                    run, microbatch, self._loss_index, getattr(run.loss, "training", True), kept
                ),
                run_loss,
            )
            check_loss(loss, run.with_grad)
        except Exception as error:
            note_failure(error, self.index, "the loss", microbatch)
            raise
        weight = run.weights[microbatch]
        if weight == 0:  # the mean over no real tokens is 0/0; it has no part in the batch's loss
            run.losses[microbatch] = torch.zeros_like(loss.detach())
            return
        if microbatch not in run.losses:  # a recompute has it already
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
            pairs.append((kept.loss, torch.full_like(kept.loss, run.loss_gradient(microbatch))))
        live = [(root, g) for root, g in pairs if g is not None and root.requires_grad]
        return [root for root, _ in live], [g for _, g in live]
