"""Run a forward again under the same conditions: buffers, modes, weights and inputs.

forward      note its conditions: modes, changing buffers, versions of weights and inputs,
             and one result; layers run, and autograd saves nothing
recompute    restore modes and buffers ──► layers run again ──► compare ──► undo
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import RecomputeError
from penstock.model.state import put_state, standing_at
from penstock.runtime.run import Run
from penstock.runtime.stage.guards import Context, LayersGuard
from penstock.runtime.stage.state import ChangingState
from penstock.runtime.stage.tape import Conditions, Tape
from penstock.runtime.stage.weights import Weights
from penstock.torch_private import buffers_of, version_counter

from .slots import Slots


class Repeatable:
    """Lets `modules` repeat a forward; the state of those that are `stateful` is restored."""

    def __init__(self, modules: Sequence[nn.Module], stateful: Sequence[nn.Module]) -> None:
        self._modules, self._stateful = modules, stateful
        self._state = ChangingState(stateful)

    @contextmanager
    def noting(self, conditions: Conditions) -> Iterator[None]:
        """Note the modes of a forward, and the old values of state that it changes."""
        conditions.modes = modes = [module.training for module in self._modules]
        looks = modes != self._state.known_in or self._holds_state()
        before = self._state.look(modes) if looks else {}
        yield
        if looks or self._holds_state():
            conditions.state = self._state.changed(before, modes)

    @contextmanager
    def restoring(self, conditions: Conditions) -> Iterator[None]:
        """Restore modes and state as the forward saw them; undo it at the end."""
        modes = [module.training for module in self._modules]
        now = {place: standing_at(place) for place in conditions.state}
        self._set_modes(conditions.modes)
        if now:
            put_state(conditions.state)
        try:
            yield
        finally:
            if now:
                put_state(now)
            self._set_modes(modes)

    def _holds_state(self) -> bool:
        return bool(self._state.attributes) or any(map(buffers_of, self._stateful))

    def _set_modes(self, modes: list[bool]) -> None:
        for module, training in zip(self._modules, modes, strict=True):
            if module.training != training:
                module.training = training


class StageRecompute(LayersGuard):
    """Drops the graphs of a stage's forwards, and lets its layers repeat them.

    If the code between layers `differentiates`, the graph stays until that code has run.
    """

    def __init__(self, whole: Repeatable, weights: Weights, *, differentiates: bool) -> None:
        self._whole, self._weights = whole, weights
        self._compares = True
        self._drops: Callable[[], Context] = (
            _dropping_late if differentiates else partial(saved_tensors_hooks, _drop, _never)
        )

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
        """Restore the conditions of the stage's forward, and compare a result."""
        return self._repeating(tape) if tape.graph_dropped else None

    @contextmanager
    def _repeating(self, tape: Tape) -> Iterator[None]:
        conditions = self.unchanged(tape)
        if conditions.input_versions != list(map(version_counter, tape.inputs)):
            raise changed("an input", "leave the batch as it is until the backward has run")
        with self._whole.restoring(conditions):
            yield
        if conditions.result is not None:
            compare(conditions.result, tape.results)
            self._compares = not conditions.result[0].is_cuda  # on a GPU the comparison must wait
            conditions.result = None

    def unchanged(self, tape: Tape) -> Conditions:
        """Return the conditions of the forward; RecomputeError if a weight changed since."""
        assert tape.conditions is not None
        if not self._weights.holds(tape.conditions.weights):
            raise changed(
                "a weight",
                "call optimizer.step() only after the backward; for a layer that changes its "
                "weight in its own forward, as nn.Embedding(max_norm=...), leave out max_norm",
            )
        return tape.conditions


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
    """Raise RecomputeError if a recompute's result differs: to the bit, on a GPU by rounding.

    Some GPU kernels add in another order in each run.
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


def changed(name: str, remedy: str) -> RecomputeError:
    """Return the error for a weight or an input that changed before its recompute."""
    return RecomputeError(
        f"{name} was changed in place between a forward and its recompute, so the activations "
        f"cannot be computed again as they were; {remedy}, or use recompute=Recompute.NEVER"
    )
