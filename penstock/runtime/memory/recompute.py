"""Drop what forwards save, and run them again under the same conditions, a segment at a time.

                 a stage is one segment              some layers are segments of their own
    forward      autograd saves nothing              layer ──► empty its slots, keep its inputs
    recompute    all layers ──► a graph              ready the slots
    backward                                         first slot asked for ──► its layer ──► fill

The conditions are modes, changing buffers, weights and inputs.  The last two are the caller's: if
they changed in between, the recompute raises.  With layers, the graph is that of the first run,
and a backward holds what one layer saves at a time.  A backward in two parts, or one that may run
layers again in the user's own checkpoint, has them all rebuilt before it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import RecomputeError
from penstock.model.copies import no_leaf
from penstock.model.entries import is_plain_class, lasts, version_of
from penstock.model.pytree import flatten, unflatten
from penstock.model.stage_plan import Step
from penstock.runtime.run import Run
from penstock.runtime.stage.guards import Context, InputGuard, LayersGuard, same_bits
from penstock.runtime.stage.state import ChangingState
from penstock.runtime.stage.tape import Conditions, LayerInput, Segment, StageInput, Tape
from penstock.runtime.stage.weights import Weights
from penstock.torch_private import version_counter

from .slots import Slots

Call = Callable[[Step, Callable[[], Any]], Any]
"""(layer, its call) -> its result: a function with which a stage runs a layer."""


class Segments(LayersGuard, InputGuard):
    """Runs the segments of a stage, and runs them again.

        first forward    layers drop saved tensors at its end, if no layer changed the inputs
        later forwards   layers drop them right after they ran

    `stateful` are the modules of the stage whose state is restored.  If the code between layers
    `differentiates`, the graph stays until that code has run.  `_keeping` are layers whose inputs
    are changed in place; they drop nothing.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        stateful: Sequence[nn.Module],
        weights: Weights,
        *,
        differentiates: bool = False,
    ) -> None:
        self._whole = ChangingState(modules, stateful)
        self._stateful, self._weights = set(stateful), weights
        self._compares = True
        self._drops: Callable[[], Context] = (
            _dropping_late if differentiates else partial(saved_tensors_hooks, _drop, _never)
        )
        self._layers: dict[int, ChangingState] = {}
        self._keeping: set[int] = set()
        self._safe: set[int] = set()

    def forget(self, error: BaseException) -> None:
        self._keeping.clear()
        self._safe.clear()

    # -- a stage ------------------------------------------------------------------------------

    def around_forward(self, run: Run, tape: Tape) -> Context | None:
        """Note the conditions of a forward that will be recomputed; keep no graph."""
        if tape.graph_dropped or tape.dropped_layers:
            tape.conditions = Conditions(weights=self._weights.shown)
            return self._noting(tape, tape.conditions) if tape.graph_dropped else None
        return None

    @contextmanager
    def _noting(self, tape: Tape, conditions: Conditions) -> Iterator[None]:
        conditions.input_versions = list(map(version_counter, tape.inputs))
        with self._whole.noting(conditions), self._drops():
            yield
        if tape.microbatch == 0 and self._compares:
            conditions.result = first_floating(tape.results)

    def around_recompute(self, run: Run, tape: Tape) -> Context | None:
        """Restore the conditions of the stage's forward, and compare a result.

        Raises:
            RecomputeError: weights or inputs changed since, or the result differs.
        """
        return self._repeating(tape) if tape.graph_dropped else None

    @contextmanager
    def _repeating(self, tape: Tape) -> Iterator[None]:
        conditions = self._unchanged(tape)
        if conditions.input_versions != list(map(version_counter, tape.inputs)):
            raise changed("an input", "leave the batch as it is until the backward has run")
        with self._whole.restoring(conditions):
            yield
        if conditions.result is not None:
            compare(conditions.result, tape.results)
            self._compares = not conditions.result[0].is_cuda  # on a GPU the comparison must wait
            conditions.result = None

    def _unchanged(self, tape: Tape) -> Conditions:
        """Return the conditions of the forward.

        Raises:
            RecomputeError: a weight changed since.
        """
        assert tape.conditions is not None
        if not self._weights.holds(tape.conditions.weights):
            raise changed(
                "a weight",
                "call optimizer.step() only after the backward; for a layer that changes its "
                "weight in its own forward, as nn.Embedding(max_norm=...), leave out max_norm",
            )
        return tape.conditions

    # -- layers -------------------------------------------------------------------------------

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
        """Let emptied slots call `rerun` when autograd asks for what they held.

        Raises:
            RecomputeError: a weight changed since the forward.
        """
        self._unchanged(tape)
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
        """Run a layer again, and fill its slots.

        Raises:
            RecomputeError: the layer saves or returns other tensors than before.
        """
        assert tape.slots is not None
        args, keywords = unflatten(segment.structure, [_again(x) for x in segment.inputs])
        step, filling = segment.step, tape.slots.filling(segment.emptied or (), segment.step.label)
        with self._of_layer(step).restoring(segment.conditions), filling:
            result = call(step, partial(segment.function, *args, **keywords))
        if segment.conditions.result is not None:
            compare(segment.conditions.result, flatten(result)[0])

    def _of_layer(self, step: Step) -> ChangingState:
        if (found := self._layers.get(step.index)) is None:
            modules = list(step.module.modules())
            found = ChangingState(modules, [m for m in modules if m in self._stateful])
            self._layers[step.index] = found
        return found


def _rebuild(of: ref[Tape], segment: Segment) -> None:
    """Run a layer again, once; several threads of autograd may ask."""
    tape = of()
    assert tape is not None
    assert tape.rerun is not None
    with segment.lock:
        if segment.emptied:
            tape.variables.copy().run(tape.rerun, tape, segment)
            segment.emptied = ()


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


def _alike(tensor: Tensor, before: Tensor) -> bool:
    return tensor.layout is not torch.strided or same_bits(tensor, before)


@contextmanager
def _dropping_late() -> Iterator[None]:
    """Let autograd save tensors, and drop all of them at the end."""
    slots = Slots(())
    try:
        with slots.hooks():
            yield
    finally:
        slots.empty(slice(None))


def _drop(tensor: Tensor) -> None:
    """Save nothing."""


def _never(nothing: None) -> Tensor:
    raise RecomputeError(
        "a layer computes gradients in its own forward (torch.autograd.grad, a penalty on a "
        "gradient), which needs what a forward that is recomputed later does not keep; use "
        "recompute=Recompute.NEVER"
    )


def first_floating(tensors: Iterable[Tensor]) -> tuple[Tensor, int] | None:
    """Return the first floating-point tensor, detached, with its version; or None."""
    for tensor in tensors:
        if tensor.is_floating_point():
            return tensor.detach(), version_counter(tensor)
    return None


def compare(result: tuple[Tensor, int], results: Iterable[Tensor]) -> None:
    """Compare a forward's result with the recompute's: to the bit, on a GPU to rounding.

    Some GPU kernels add in another order in each run.

    Raises:
        RecomputeError: the results differ, so a layer reads state that changed in between.
    """
    tensor, version = result
    again, _ = first_floating(results) or (None, 0)
    if version_counter(tensor) != version or again is None:
        return  # the caller changed the output in place since
    rounding = torch.finfo(again.dtype).eps ** 0.5 if again.is_cuda else 0.0
    if again.shape != tensor.shape or not (
        torch.equal(tensor, again)
        or torch.allclose(tensor, again, rtol=rounding, atol=rounding, equal_nan=True)
    ):
        raise RecomputeError(
            "a recompute did not give what its forward gave: a layer or the loss draws from a "
            "generator that is not keyed (numpy.random.default_rng(), random.Random()), counts "
            "its calls in a Python attribute, or reads something else that changed. Zero the "
            "gradients; draw from torch, random or numpy.random itself, and keep other such state "
            "in a buffer. State that one layer alone has may stay as it is with "
            "recompute=Recompute.NEVER"
        )


def changed(what: str, remedy: str) -> RecomputeError:
    """Return the error for a weight or an input that changed before its recompute."""
    return RecomputeError(
        f"{what} was changed in place between a forward and its recompute, so the activations "
        f"cannot be computed again as they were; {remedy}, or use recompute=Recompute.NEVER"
    )
