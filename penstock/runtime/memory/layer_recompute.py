"""Drop the saved tensors of some layers, and run only these again before the backward.

    forward     layer ──► empty its slots, keep its inputs
    recompute   inputs ──► layer ──► fill the slots in the order in which they were emptied

The graph is that of the first run.  A layer that changes its inputs in place drops nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import RecomputeError
from penstock.model.copies import no_leaf
from penstock.model.entries import is_plain_class, lasts, version_of
from penstock.model.pytree import flatten, unflatten
from penstock.model.stage_plan import Step
from penstock.runtime.run import Run
from penstock.runtime.stage.guards import InputGuard, same_bits
from penstock.runtime.stage.tape import LayerInput, Rerun, StageInput, Tape

from .recompute import changed, compare, first_floating
from .slots import Layout, Slot, Slots, unpack

Call = Callable[[Step, Callable[[], Any]], Any]
"""(layer, its call) -> its result: a function with which a stage runs a layer."""


class LayerRecompute(InputGuard):
    """Runs the layers of a stage that are recomputed one by one.

        first forward    drop saved tensors at its end, if no layer changed the inputs
        later forwards   drop them right after the layer

    `_keeping` are layers whose inputs are changed in place; they drop nothing.
    """

    def __init__(self) -> None:
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
        inputs = [_kept(leaf, slots) for leaf in leaves]
        versions = [version_of(leaf) for leaf in leaves]
        copies = [leaf.detach().clone() for leaf in leaves] if is_new else leaves

        # 2. Run; the slots from `mark` on are the layer's.
        mark = slots.mark()
        result = call(step, function)
        is_same = versions == [version_of(leaf) for leaf in leaves]
        if not is_same or (is_new and not all(map(_alike, leaves, copies))):
            self._keeping.add(step.index)
            return result

        # 3. Empty the slots now, or in `after_layers` if a later layer may change the inputs.
        saved = slice(mark, slots.mark())
        seen = first_floating(flatten(result)[0]) if is_new else None
        rerun = Rerun(step, function.func, inputs, structure, saved, seen)
        if not is_new:
            rerun.emptied = slots.empty(saved)
        tape.reruns.append(rerun)
        return result

    def after_layers(self, run: Run, tape: Tape, inputs: Sequence[StageInput]) -> None:
        """Drop the saved tensors of layers that ran for the first time, if inputs are the same."""
        for rerun in [r for r in tape.reruns if r.emptied is None]:
            assert tape.slots is not None
            if all(x.is_as_given for x in rerun.inputs):
                rerun.emptied = tape.slots.empty(rerun.saved)
                self._safe.add(rerun.step.index)
            else:
                tape.reruns.remove(rerun)
                self._keeping.add(rerun.step.index)

    def rerun(self, tape: Tape, call: Call) -> None:
        """Run the layers again, and fill their slots.

        Raises:
            RecomputeError: a layer saves or returns other tensors than before.
        """
        assert tape.slots is not None
        while tape.reruns:
            layer = tape.reruns.pop(0)
            args, keywords = unflatten(layer.structure, [_again(x) for x in layer.inputs])
            filling = _Filling(tape.slots, layer)
            with filling.hooks():
                result = call(layer.step, partial(layer.function, *args, **keywords))
            filling.check_all_full()
            if layer.result is not None:
                compare(layer.result, flatten(result)[0])


def _kept(tensor: Tensor, slots: Slots) -> LayerInput:
    """Keep an input of a layer: in a slot, or itself if it outlives the tape."""
    stays = lasts(tensor) or not is_plain_class(tensor)
    return LayerInput(tensor if stays else slots.keep(tensor), tensor.requires_grad)


def _again(given: LayerInput) -> Tensor:
    """Return an input for the layer's second run.

    Raises:
        RecomputeError: it was changed in place since.
    """
    if isinstance(given.kept, Tensor):
        return given.kept
    if not given.is_as_given:
        raise changed("an input of a layer", "let the layers after it work on a copy (x.clone())")
    twin = given.kept.take().detach()
    return no_leaf(twin.requires_grad_()) if given.wants_grad else twin


class _Filling:
    """Fills the slots of one layer with autograd's saved tensors, in order."""

    def __init__(self, slots: Slots, layer: Rerun) -> None:
        self._slots, self._emptied, self._step = slots, layer.emptied or (), layer.step
        self._count = 0

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, unpack)

    def _pack(self, tensor: Tensor) -> Slot | Tensor:
        if not is_plain_class(tensor):
            return tensor
        again = tensor.detach()
        if self._slots.may_move(tensor):
            if self._count == len(self._emptied):
                raise self._differs("it saves more tensors than before")
            slot, layout = self._emptied[self._count]
            self._count += 1
            found = Layout.of(again)
            if layout is not None and found[:3] != layout[:3]:
                was, now = (
                    f"{x.dtype} of shape {tuple(x.shape)}, strides {x.stride}"
                    for x in (layout, found)
                )
                raise self._differs(f"tensor {self._count} that it saves was {was}, and is {now}")
            if (empty := slot()) is not None:
                empty.fill(again)
        return Slot(again)

    def check_all_full(self) -> None:
        """Check that the layer saved as many tensors as before.

        Raises:
            RecomputeError: it saved fewer.
        """
        if self._count < len(self._emptied):
            raise self._differs(
                f"it saves {self._count} tensors for its backward, and had saved "
                f"{len(self._emptied)}"
            )

    def _differs(self, what: str) -> RecomputeError:
        return RecomputeError(
            f"layer {self._step.label} did not do what it did in its forward: {what}. It reads "
            "something that changed; recompute other layers, or use recompute=Recompute.NEVER"
        )


def _alike(tensor: Tensor, before: Tensor) -> bool:
    return tensor.layout is not torch.strided or same_bits(tensor, before)
