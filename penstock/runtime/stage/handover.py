"""Turn messages into leaves of a stage's autograd graph, and its results into messages.

The last stage turns the model's output into a loss, or into the caller's output.

      ┌──────────────── stage ────────────────┐
peer ──► Activation ──► entries   exported leaves ──► Activation ──► peer
peer ◄── Gradient ◄──── entries   exported leaves ◄── Gradient ◄──── peer
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, count
from typing import Any, TypeVar

import torch
from torch import Tensor

from penstock.errors import BoundaryError
from penstock.model.capture.forward_pass import unchanged
from penstock.model.copies import faithful_copy, no_leaf
from penstock.model.entries import (
    LASTING,
    are_plain,
    detached,
    lasts,
    layouts_on,
    like,
    make_entry,
    marked,
    version_of,
)
from penstock.model.pytree import ONE_TENSOR, Structure, flatten, tree_map, unflatten
from penstock.model.stage_plan import MODEL_INPUT, StagePlan, Value
from penstock.runtime.devices import Event, StageDevice
from penstock.runtime.gradient_dtype import widen_gradients
from penstock.runtime.random.drawing import Drawing, LayerCall
from penstock.runtime.run import Run, StageRun
from penstock.runtime.shards.divided import NO_LAYER, Called
from penstock.torch_private import has_tensor_hooks
from penstock.transport.channels import Activation, Gradient, check_still_as_sent

from .boundary import check_classes, check_leaving, check_loss, check_routes, find_aliases
from .guards import InPlaceChanges
from .notes import note_failure
from .tape import FROM_CALLER, StageInput, Tape


def hold_back(
    sums: dict[int, Tensor],
    gradients: Sequence[Tensor | None],
    lasting: Collection[int],
    *,
    is_last: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients to send to one peer after a micro-batch.

    Gradients of weights that last for the run are added to `sums`, by place, and leave with the
    last micro-batch.  Micro-batches come in order, so the sums are the same in every run.
    """
    sent = list(gradients)
    for place in lasting:
        gradient, sent[place] = gradients[place], None
        if gradient is not None:
            sums[place] = sums[place] + gradient if place in sums else gradient
        if is_last:
            sent[place] = sums.pop(place, None)
    return tuple(sent)


_T = TypeVar("_T", Tensor, Tensor | None)


def once(activation: Activation) -> Activation:
    """Return an activation whose weights hold for this micro-batch only.

    Later micro-batches see other versions.  `.data` has a version counter of its own, which an
    update of the parameter leaves alone.
    """
    if not activation.lasting:
        return activation
    leaves, versions = list(activation.leaves), list(activation.versions)
    for place in activation.lasting:
        leaves[place] = leaves[place].data
        versions[place] = version_of(leaves[place])
    return replace(activation, leaves=tuple(leaves), versions=tuple(versions), lasting=frozenset())


def _refuse_gradients(
    values: Sequence[Tensor], hooked: Iterable[int], peer: int, tape: Tape
) -> None:
    """Make layers that compute gradients of `hooked` values raise, until `tape` disarms."""
    for value in [values[place] for place in hooked]:
        if value.requires_grad:
            tape.tripwires.append(value.register_hook(partial(_is_found, peer)))


def _is_found(peer: int, gradient: Tensor) -> None:
    raise BoundaryError(
        "a layer computes a gradient in its own forward (torch.autograd.grad): that of a tensor "
        f"of shape {tuple(gradient.shape)} from stage {peer}, on whose gradient a hook is "
        "(register_hook, in a forward hook of the layer that made it, say). In the unsplit model "
        "that hook runs then, too; here it is on the other stage. Keep both layers on one stage "
        "(partition=, or together= of penstock.capture), or put the hook into the layer that "
        "computes the gradient"
    )


class Handover:
    """Receives and sends the values and gradients of a stage, and computes the loss.

    `changes` knows the values that layers change in place.  The loss draws as layer number
    `loss_index`.  `divided` are the calls in shards by number, of the loss too.
    """

    def __init__(
        self,
        plan: StagePlan,
        device: StageDevice,
        changes: InPlaceChanges,
        drawing: Drawing,
        loss_index: int,
        divided: Mapping[int, Called],
    ) -> None:
        self._plan, self._device, self._changes = plan, device, changes
        self._drawing, self._loss_index, self._divided = drawing, loss_index, divided

    def bring_activation(self, activation: Activation) -> Activation:
        """Bring received values to this stage's device."""
        if not self._device.is_cuda and activation.event is None:
            return activation
        here = tuple(self._device.bring(activation.leaves, activation.event))
        versions = tuple(
            version if new is old else version_of(new)
            for new, old, version in zip(here, activation.leaves, activation.versions, strict=True)
        )
        return replace(activation, leaves=here, versions=versions, event=None)

    def _bring(self, tensors: Sequence[_T], event: Event | None = None) -> Sequence[_T]:
        """Bring tensors to this stage's device; on a CPU most need no work."""
        device = self._device.device
        lags = event is not None or self._device.is_cuda
        for tensor in tensors:
            lags = lags or (tensor is not None and tensor.device != device)
        return self._device.bring(tensors, event) if lags else tensors

    def receive(self, run: Run, here: StageRun, microbatch: int) -> dict[int, Activation]:
        """Return a micro-batch's arrived values and, if the stage reads them, the inputs."""
        received: dict[int, Activation] = {}
        for peer in self._plan.imports:
            received[peer] = here.arrived.pop((microbatch, peer))
        if self._plan.reads_input:
            batch, structure = flatten((run.batch.inputs[microbatch],))
            leaves = batch
            if not run.caller.with_grad:  # layers may change inputs: each micro-batch has its own
                shared = self._plan.shares_input
                leaves = [faithful_copy(leaf) if shared else leaf.data for leaf in batch]
            aliases = find_aliases({FROM_CALLER: batch}) if len(batch) > 1 else {}
            received[FROM_CALLER] = Activation(
                tuple(self._bring(leaves)),
                tuple([leaf.requires_grad for leaf in leaves]),
                structure,
                tuple(map(version_of, leaves)),
                aliases.get(FROM_CALLER, frozenset()),
            )
        return received

    def enter(self, run: Run, tape: Tape) -> tuple[dict[Value, Any], list[StageInput]]:
        """Make leaves of this stage's own graph from received tensors, and name their values.

        received ──► leaf (entry) ──► copy, if layers change it     ──► layers
                                 └──► twin, if offload may empty it ──► layers
        """
        values: dict[Value, Any] = {}
        inputs: list[StageInput] = []
        with_grad = run.caller.with_grad
        slotted = tape.slots is not None
        caches = slotted or (with_grad and torch.is_autocast_enabled(self._device.device.type))
        for peer, activation in tape.received.items():
            is_elsewhere = peer != FROM_CALLER or self._plan.shares_input
            entries, inside = [], []
            for place, tensor in enumerate(activation.leaves):
                if peer != FROM_CALLER and version_of(tensor) != activation.versions[place]:
                    check_still_as_sent(tensor, activation.versions[place], peer)
                # The entry is the leaf at which autograd stops and whose gradient is sent back.
                entry = make_entry(tensor, with_grad and activation.wants_grad[place])
                entries.append(entry)
                sent = value = entry.tensor
                lasts_on, alias = place in activation.lasting, place in activation.aliases
                copied = with_grad and self._changes.copies((peer, place), lasts=lasts_on)
                if copied:
                    value = faithful_copy(sent)
                elif caches and not lasts_on:
                    value = no_leaf(sent)
                # Layers get a value of the sender's class, marked with its layout in shards.
                is_usual = type(tensor) is Tensor and not activation.layouts
                shown = value if is_usual else like(value, tensor)
                inside.append(shown if is_usual else marked(shown, activation.layouts, place))
                if lasts_on:
                    widen_gradients([sent], run.gradient_dtype)
                    setattr(inside[-1], LASTING, True)
                # Note the versions: an in-place change shows after the layers have run.
                if with_grad or (alias and is_elsewhere):
                    key, before = (peer, place), None if with_grad else sent.clone()
                    inputs.append(
                        StageInput(key, value, version_of(value), copied, alias, sent, before)
                    )
            tape.entries[peer] = entries
            _refuse_gradients(inside, activation.hooked, peer, tape)
            names = (MODEL_INPUT,) if peer == FROM_CALLER else self._plan.imports[peer]
            values.update(zip(names, unflatten(activation.structure, inside), strict=True))
        return values, inputs

    def export(
        self, values: dict[Value, Any], inputs: Sequence[StageInput], tape: Tape
    ) -> dict[int, Activation]:
        """Return the activations to send, and note their leaves in the tape."""
        # 1. Collect the leaves for each peer, and refuse values that cannot cross.
        structures = {}
        try:
            for peer, exported in self._plan.exports.items():
                leaves, structure = flatten(tuple(map(values.__getitem__, exported)))
                is_usual = structure is ONE_TENSOR and are_plain(leaves) and leaves[0].dim()
                if not is_usual:
                    any_shape = self._plan.any_shape
                    check_leaving(leaves, structure, self._plan.index, peer, any_shape=any_shape)
                tape.exported[peer], structures[peer] = leaves, structure
            if len(structures) > 1:
                check_routes(tape.exported, self._plan.index)
        except BoundaryError as error:
            note_failure(
                error, self._plan.index, f"layer {self._plan.steps[-1].label}", tape.microbatch
            )
            raise
        # 2. Mark values that share memory: the receiver must not change one of them alone.
        known = [g.tensor for g in inputs if g.is_alias]
        is_single = len(known) + sum(map(len, tape.exported.values())) < 2
        aliases = {} if is_single else find_aliases(tape.exported, known)
        return {
            peer: self._message(leaves, structures[peer], aliases.get(peer, frozenset()))
            for peer, leaves in tape.exported.items()
        }

    def _message(
        self, leaves: Sequence[Tensor], structure: Structure, aliases: frozenset[int]
    ) -> Activation:
        """Return the message with leaves of this stage's graph for another stage."""
        return Activation(
            tuple(map(detached, leaves)),
            tuple([leaf.requires_grad for leaf in leaves]),
            structure,
            tuple(map(version_of, leaves)),
            aliases,
            self._device.mark() if self._device.is_cuda else None,
            frozenset(compress(count(), map(lasts, leaves))),
            frozenset(compress(count(), map(has_tensor_hooks, leaves))),
            layouts_on(leaves),
        )

    def roots(self, run: Run, here: StageRun, tape: Tape) -> tuple[list[Tensor], list[Tensor]]:
        """Return the roots of the backward that have gradients, and these gradients.

        A value that this stage exports and also uses is a root inside the graph: autograd starts
        its sum with the gradient that arrived.
        """
        i = tape.microbatch
        pairs: list[tuple[Tensor, Tensor | None]] = []
        for peer, leaves in tape.exported.items():
            gradient = here.arrived_gradients.pop((i, peer))
            pairs += zip(leaves, self._bring(gradient.leaves, gradient.event), strict=True)
        if tape.output and run.output_gradients is not None:
            pairs += zip(tape.output, self._bring(run.output_gradients[i]), strict=True)
        if tape.loss is not None:
            pairs.append((tape.loss, torch.empty_like(tape.loss).fill_(run.loss_gradients[i])))
        live = [(root, g) for root, g in pairs if g is not None and root.requires_grad]
        return [root for root, _ in live], [g for _, g in live]

    def leave_gradient(self, run: Run, here: StageRun, tape: Tape, peer: int) -> None:
        """Leave the gradients of one peer's values for their send instruction."""
        i = tape.microbatch
        gradients = tuple([entry.gradient for entry in tape.entries[peer]])
        if not are_plain(gradients):
            check_classes(gradients, f"is a gradient that stage {self._plan.index} found")
        if run.sums_tied and not self._plan.decides:  # else a place may be another weight's
            sums = here.tied_sums.setdefault(peer, {})
            is_last = i == len(run.batch.sizes) - 1
            lasting = tape.received[peer].lasting
            gradients = hold_back(sums, gradients, lasting, is_last=is_last)
        if peer != FROM_CALLER:
            event = self._device.mark() if self._device.is_cuda else None
            layouts = tape.received[peer].layouts
            here.leaving_gradients[i, peer] = Gradient(gradients, event, layouts)
        elif any(gradient is not None for gradient in gradients):
            run.input_gradients[i] = gradients

    def take_output(self, run: Run, tape: Tape, output: Any) -> None:
        """Store the output of a micro-batch for the caller, or its loss."""
        microbatch = tape.microbatch
        if run.loss is None:
            if (gathered := self._divided.get(NO_LAYER)) is not None:
                output = gathered(partial(unchanged, output), {})
            tape.output, structure = flatten(output)
            if not are_plain(tape.output):
                check_classes(tape.output, "leaves the last stage")
            tape.output_wants_grad = tuple([leaf.requires_grad for leaf in tape.output])
            run.outputs[microbatch] = unflatten(structure, [detached(t) for t in tape.output])
            return
        loss = self._loss(run, tape, output)
        weight = run.batch.weights[microbatch]
        if weight == 0:  # the mean over no real tokens is 0/0: leave it out of the batch's loss
            run.losses[microbatch] = torch.zeros_like(loss.detach())
            return
        if microbatch not in run.losses:  # a recompute has it already
            run.losses[microbatch] = loss.detach() * weight
        tape.loss = loss

    def _loss(self, run: Run, tape: Tape, output: Any) -> Tensor:
        """Compute the user's loss, with its own random stream if it draws."""
        assert run.loss is not None
        target = run.batch.targets[tape.microbatch]
        if not isinstance(target, Tensor) or target.device != self._device.device:
            target = tree_map(lambda t: self._device.bring([t], None)[0], target)
        training = getattr(run.loss, "training", True)
        call = LayerCall(run, tape, self._loss_index, training)
        compute = partial(run.loss, output, target)
        if (divided := self._divided.get(self._loss_index)) is not None:
            compute = partial(divided, compute, tape.layouts)
        try:
            is_silent = (self._loss_index, training) in self._drawing.silent
            loss: Tensor = compute() if is_silent else self._drawing.run(call, compute)
            if not (isinstance(loss, Tensor) and loss.dim() == 0 and loss.requires_grad):
                check_loss(loss, run.caller.with_grad)
        except Exception as error:
            note_failure(error, self._plan.index, "the loss", tape.microbatch)
            raise
        return loss
