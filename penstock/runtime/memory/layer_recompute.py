"""Drop the saved tensors of some layers; the backward runs each again when it comes to it.

    forward      layer ──► empty its slots, keep its inputs
    backward     first slot that autograd asks for ──► its layer ──► fill the slots, in order

The graph is that of the first run, and holds what one layer saves at a time.  Before a backward in
two parts, or one that may run layers again in the user's own checkpoint, all of them run again.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from penstock.model.copies import no_leaf
from penstock.model.entries import is_plain_class, lasts, version_of
from penstock.model.pytree import flatten, unflatten
from penstock.model.stage_plan import Step
from penstock.runtime.run import Run
from penstock.runtime.stage.guards import InputGuard, same_bits
from penstock.runtime.stage.tape import Conditions, Segment, StageInput, Tape

from .recompute import Repeatable, changed, compare, first_floating
from .slots import LayerInput

Call = Callable[[Step, Callable[[], Any]], Any]
"""(layer, its call) -> its result: a function with which a stage runs a layer."""


class LayerRecompute(InputGuard):
    """Runs the layers of a stage that are recomputed one by one.

        first forward    drop saved tensors at its end, if no layer changed the inputs
        later forwards   drop them right after the layer

    State of the modules `stateful` is restored.  `_keeping` are layers whose inputs are changed in
    place; they drop nothing.
    """

    def __init__(self, stateful: Sequence[nn.Module]) -> None:
        self._stateful = set(stateful)
        self._layers: dict[int, Repeatable] = {}
        self._keeping: set[int] = set()
        self._safe: set[int] = set()

    def forget(self, error: BaseException) -> None:
        self._keeping.clear()
        self._safe.clear()

    def run(self, tape: Tape, step: Step, function: Callable[[], Any], call: Call) -> Any:
        """Run a layer, and drop its saved tensors."""
        if step.index in self._keeping:
            return call(step, function)
        assert isinstance(function, partial)
        slots, is_new = tape.slots, step.index not in self._safe
        assert slots is not None
        # 1. Keep the inputs, with copies if the layer may change them in place.
        leaves, structure = flatten((function.args, function.keywords))
        inputs = [
            LayerInput(x if lasts(x) or not is_plain_class(x) else slots.keep(x), x.requires_grad)
            for x in leaves
        ]
        versions = [version_of(leaf) for leaf in leaves]
        copies = [leaf.detach().clone() for leaf in leaves] if is_new else leaves

        # 2. Run; the slots from `mark` on are the layer's.
        mark, conditions = slots.mark(), Conditions()
        with self._of_layer(step).noting(conditions):
            result = call(step, function)
        is_same = versions == [version_of(leaf) for leaf in leaves]
        if not is_same or (is_new and not all(map(_alike, leaves, copies))):
            self._keeping.add(step.index)
            return result

        # 3. Empty the slots now, or in `after_layers` if a later layer may change the inputs.
        saved = slice(mark, slots.mark())
        conditions.result = first_floating(flatten(result)[0]) if is_new else None
        segment = Segment(step, function.func, inputs, structure, conditions, saved)
        if not is_new:
            segment.emptied = slots.empty(saved)
        tape.segments.append(segment)
        return result

    def after_layers(self, run: Run, tape: Tape, inputs: Sequence[StageInput]) -> None:
        """Drop the saved tensors of layers that ran for the first time, if inputs are the same."""
        for segment in [s for s in tape.segments if s.emptied is None]:
            assert tape.slots is not None
            if all(x.is_as_given for x in segment.inputs):
                segment.emptied = tape.slots.empty(segment.saved)
                self._safe.add(segment.step.index)
            else:
                tape.segments.remove(segment)
                self._keeping.add(segment.step.index)

    def ready(self, tape: Tape, rerun: Callable[[Tape, Segment], None]) -> None:
        """Let emptied slots call `rerun` when autograd asks for what they held."""
        tape.rerun = rerun
        segments, tape.segments = tape.segments, []
        for segment in segments:
            rebuild = partial(_rebuild, ref(tape), segment)
            for slot, _ in segment.emptied or ():
                if (empty := slot()) is not None:
                    empty.rebuild = rebuild
            if tape.may_rerun:  # autograd's surroundings are then those of the user's checkpoints
                rebuild()

    def rerun(self, tape: Tape, segment: Segment, call: Call) -> None:
        """Run a layer again, and fill its slots; RecomputeError if its tensors are others."""
        assert tape.slots is not None
        args, keywords = unflatten(segment.structure, [_again(x) for x in segment.inputs])
        step, filling = segment.step, tape.slots.filling(segment.emptied or (), segment.step.label)
        with self._of_layer(step).restoring(segment.conditions), filling:
            result = call(step, partial(segment.function, *args, **keywords))
        if segment.conditions.result is not None:
            compare(segment.conditions.result, flatten(result)[0])

    def _of_layer(self, step: Step) -> Repeatable:
        if (repeatable := self._layers.get(step.index)) is None:
            modules = list(step.module.modules())
            repeatable = Repeatable(modules, [m for m in modules if m in self._stateful])
            self._layers[step.index] = repeatable
        return repeatable


def _rebuild(tape_of: ref[Tape], segment: Segment) -> None:
    """Run a layer again, once; several threads of autograd may ask."""
    tape = tape_of()
    assert tape is not None
    assert tape.rerun is not None
    with segment.lock:
        if segment.emptied:
            tape.variables.copy().run(tape.rerun, tape, segment)
            segment.emptied = ()


def _again(layer_input: LayerInput) -> Tensor:
    """Return an input for the layer's second run; RecomputeError if it was changed in place."""
    if isinstance(layer_input.saved, Tensor):
        return layer_input.saved
    if not layer_input.is_as_given:
        raise changed("an input of a layer", "let the layers after it work on a copy (x.clone())")
    twin = layer_input.saved.take().detach()
    return no_leaf(twin.requires_grad_()) if layer_input.wants_grad else twin


def _alike(tensor: Tensor, before: Tensor) -> bool:
    return tensor.layout is not torch.strided or same_bits(tensor, before)
