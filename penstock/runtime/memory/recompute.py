"""Run a forward again under the same conditions: buffers, modes, weights and inputs.

    forward      note its conditions: modes, changing buffers, versions of weights and inputs,
                 and one result; layers run, and autograd saves nothing
    recompute    restore modes and buffers ──► layers run again ──► compare ──► undo

Weights and inputs are the caller's.  If they changed in between, the recompute raises.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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


class Repeatable(LayersGuard):
    """Lets the layers of a stage repeat a forward that kept no graph.

    `stateful` are the modules whose buffers and tensor attributes are restored.  If the code
    between layers `differentiates`, the graph stays until that code has run.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        stateful: Sequence[nn.Module],
        weights: Weights,
        *,
        differentiates: bool = False,
    ) -> None:
        self._modules = modules
        self._stateful = stateful
        self._state = ChangingState(stateful)
        self._weights = weights
        self._compares = True
        self._drops: Callable[[], Context] = (
            _dropping_late if differentiates else partial(saved_tensors_hooks, _drop, _never)
        )

    def around_forward(self, run: Run, tape: Tape) -> Context | None:
        """Note the conditions of a forward that will be recomputed; keep no graph."""
        return self._noting(tape) if tape.graph_dropped or tape.dropped_layers else None

    @contextmanager
    def _noting(self, tape: Tape) -> Iterator[None]:
        modes = [module.training for module in self._modules]
        versions = list(map(version_counter, tape.inputs if tape.graph_dropped else ()))
        conditions = Conditions({}, modes, self._weights.shown, versions)
        is_new = modes != self._state.known_in
        before = self._state.look(modes) if is_new or self._holds_state() else {}
        with self._drops() if tape.graph_dropped else nullcontext():
            yield
        if is_new or self._holds_state():
            conditions.state = self._state.changed(before, modes)
        if tape.microbatch == 0 and self._compares and tape.graph_dropped:
            conditions.result = first_floating(tape.results)
        tape.conditions = conditions

    @contextmanager
    def around_recompute(self, run: Run, tape: Tape) -> Iterator[None]:
        """Restore the conditions of the forward, and compare a result.

        Raises:
            RecomputeError: weights or inputs changed since, or the result differs.
        """
        conditions = tape.conditions
        assert conditions is not None
        undo = self._put_back(conditions, tape.inputs if tape.graph_dropped else ())
        try:
            yield
        finally:
            undo()
        if conditions.result is not None:
            compare(conditions.result, tape.results)
            self._compares = not conditions.result[0].is_cuda  # on a GPU the comparison must wait
            conditions.result = None

    def _put_back(self, conditions: Conditions, inputs: Sequence[Tensor]) -> Callable[[], None]:
        """Restore modes and state as the forward saw them; return a function that undoes it.

        Raises:
            RecomputeError: weights or inputs changed since.
        """
        if not self._weights.holds(conditions.weights):
            raise changed(
                "a weight",
                "call optimizer.step() only after the backward; for a layer that changes its "
                "weight in its own forward, as nn.Embedding(max_norm=...), leave out max_norm",
            )
        if conditions.input_versions != [version_counter(t) for t in inputs]:
            raise changed("an input", "leave the batch as it is until the backward has run")
        modes = [module.training for module in self._modules]
        if not conditions.state and modes == conditions.modes:
            return lambda: None
        now = {place: standing_at(place) for place in conditions.state}
        self._set_modes(conditions.modes)
        put_state(conditions.state)

        def undo() -> None:
            put_state(now)
            self._set_modes(modes)

        return undo

    def _holds_state(self) -> bool:
        return bool(self._state.attributes) or any(map(buffers_of, self._stateful))

    def _set_modes(self, modes: list[bool]) -> None:
        for module, training in zip(self._modules, modes, strict=True):
            module.training = training


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
