"""What a forward saw, so that a recompute sees the same: buffers, modes, weights and inputs.

Buffers and modes are put back for the recompute.  Weights and inputs are the caller's: if they
changed in between, there is nothing right to compute, and that is an error.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import RecomputeError
from penstock.model.state import ABSENT, Place, attributes, put_state, read_state, standing_at
from penstock.torch_private import parameters_of, version_counter

from .boundary import same_bits


@dataclass(slots=True)
class Seen:
    """What one forward saw: changing state, training modes, versions of weights and inputs."""

    state: dict[Place, Any]
    modes: list[bool]
    weights: list[tuple[int, int, int]]
    input_versions: list[int]


@dataclass(frozen=True, slots=True)
class Witness:
    """A result of a forward, which its recompute must give again."""

    tensor: Tensor
    version: int

    @classmethod
    def among(cls, results: Iterable[Tensor]) -> "Witness | None":
        """Choose one of the results; keeps its memory."""
        chosen = _first_floating(results)
        return None if chosen is None else cls(chosen, version_counter(chosen))

    def compare(self, results: Iterable[Tensor]) -> None:
        """Compare with what a recompute gave: to the bit, on a GPU to rounding, since some of its
        kernels add in an order that differs from run to run.

        Raises:
            RecomputeError: it gave something else, so a layer reads what changed in between.
        """
        again = _first_floating(results)
        if version_counter(self.tensor) != self.version or again is None:
            return  # the caller has changed the output in place since
        rounding = torch.finfo(again.dtype).eps ** 0.5 if again.is_cuda else 0.0
        same_shape = again.shape == self.tensor.shape
        if not same_shape or not _close(self.tensor, again, rounding):
            raise RecomputeError(
                "a recompute did not give what its forward gave: a layer or the loss draws random "
                "numbers outside torch (random, numpy), counts its calls in a Python attribute, "
                "or reads something else that changed. Zero the gradients; keep such state in a "
                "buffer, or use recompute=Recompute.NEVER"
            )


def _first_floating(tensors: Iterable[Tensor]) -> Tensor | None:
    return next((t.detach() for t in tensors if t.is_floating_point()), None)


def _close(a: Tensor, b: Tensor, rounding: float) -> bool:
    return torch.equal(a, b) or torch.allclose(a, b, rtol=rounding, atol=rounding, equal_nan=True)


def dropping_graph() -> saved_tensors_hooks:
    """Let autograd save nothing inside: the graph of that forward is never used."""
    return saved_tensors_hooks(_drop, _never)


def _drop(tensor: Tensor) -> None:
    """Save nothing."""


def _never(nothing: None) -> Tensor:
    raise RecomputeError(
        "a layer computes gradients in its own forward (torch.autograd.grad, a penalty on a "
        "gradient), which needs what a forward that is recomputed later does not keep; use "
        "recompute=Recompute.NEVER"
    )


class Repeatable:
    """The layers of a stage, whose forward can be run again as it was.

    seen = look(inputs)   ──► forward ──► note_changes(seen)
    undo = put_back(seen) ──► forward again ──► undo()
    """

    def __init__(self, modules: tuple[nn.Module, ...], skip: tuple[nn.Module, ...]) -> None:
        self._state = _ChangingState(modules, skip)
        self._modules = list(dict.fromkeys(m for root in modules for m in root.modules()))

    def look(self, inputs: Sequence[Tensor]) -> Seen:
        """Say what a forward is about to see."""
        modes = self._modes()
        return Seen(
            self._state.look(modes), modes, self._weights(), [version_counter(t) for t in inputs]
        )

    def note_changes(self, seen: Seen) -> None:
        """Keep, of all that the forward saw, what it has changed.

        Raises:
            RecomputeError: it changed a buffer that no earlier forward changed.
        """
        seen.state = self._state.changed(seen.state)

    def put_back(self, seen: Seen, inputs: Sequence[Tensor]) -> Callable[[], None]:
        """Let the modules be as the forward saw them; gives what undoes that.

        Raises:
            RecomputeError: weights or inputs changed since.
        """
        if seen.weights != self._weights():
            raise _changed(
                "a weight",
                "call optimizer.step() only after the backward; for a layer that changes its "
                "weight in its own forward, as nn.Embedding(max_norm=...), leave out max_norm",
            )
        if seen.input_versions != [version_counter(t) for t in inputs]:
            raise _changed("an input", "leave the batch as it is until the backward has run")
        modes = self._modes()
        if not seen.state and modes == seen.modes:
            return _nothing
        now = {place: standing_at(place) for place in seen.state}
        self._set_modes(seen.modes)
        put_state(seen.state)

        def undo() -> None:
            put_state(now)
            self._set_modes(modes)

        return undo

    def _modes(self) -> list[bool]:
        return [module.training for module in self._modules]

    def _set_modes(self, wanted: list[bool]) -> None:
        for module, training in zip(self._modules, wanted, strict=True):
            module.training = training

    def _weights(self) -> list[tuple[int, int, int]]:
        """Say which weights there are, in which version, where; an assigned `.data` moves."""
        return [
            (id(p), version_counter(p), p.data_ptr())
            for m in self._modules
            for p in parameters_of(m).values()
            if p is not None
        ]


def _nothing() -> None:
    """There is nothing to undo."""


def _changed(what: str, remedy: str) -> RecomputeError:
    return RecomputeError(
        f"{what} was changed in place between a forward and its recompute, so the activations "
        f"cannot be computed again as they were; {remedy}, or use recompute=Recompute.NEVER"
    )


class _ChangingState:
    """Finds out what state of a stage its forward changes, and keeps what each forward saw.

    State are buffers, and tensors that a module holds as plain attributes.  The first forward in
    some training modes keeps a copy of everything and compares it, since some kernels (that of
    BatchNorm) change a buffer without a new version; from then on only what was seen to change in
    place is copied.  A buffer may be None, or not be there yet.
    """

    def __init__(self, modules: tuple[nn.Module, ...], skip: tuple[nn.Module, ...]) -> None:
        skipped = set(map(id, skip))
        self._modules = [m for root in modules for m in root.modules() if id(m) not in skipped]
        self._attributes = attributes(self._modules)
        self._copied: set[Place] | None = None
        self._modes: list[bool] = []

    def look(self, modes: list[bool]) -> dict[Place, Any]:
        """Give what stands at each place, its version, and a copy if it may change in place."""
        if modes != self._modes:  # what a layer leaves alone in one mode it may change in another
            self._copied, self._modes = None, modes
        before = read_state(self._modules, self._attributes)
        return {
            place: (
                tensor,
                version_counter(tensor),
                _copy(tensor) if self._may_change(place) else None,
            )
            if tensor is not None
            else (None, 0, None)
            for place, tensor in before.items()
        }

    def _may_change(self, place: Place) -> bool:
        return self._copied is None or place in self._copied

    def changed(self, before: dict[Place, Any]) -> dict[Place, Any]:
        """Give the old values of what the forward changed, in place or by another tensor.

        Raises:
            RecomputeError: it changed a tensor in place that no earlier forward changed, so the
                old value is lost.
        """
        if self._copied is None:
            self._attributes = attributes(self._modules)
            self._copied = set()
        now = read_state(self._modules, self._attributes)
        old: dict[Place, Any] = dict.fromkeys(now.keys() - before.keys(), ABSENT)
        for place, (tensor, version, copy) in before.items():
            if tensor is not None and (
                place in self._copied or _changed_in_place(tensor, version, copy)
            ):
                self._copied.add(place)
                if copy is None:
                    raise _lost(place)
                old[place] = copy
            elif now.get(place) is not tensor:
                old[place] = tensor
        return old


def _lost(place: Place) -> RecomputeError:
    module, is_buffer, name = place
    kind = "buffer" if is_buffer else "attribute"
    return RecomputeError(
        f"the forward changed {kind} {name!r} of a {type(module).__name__} in place, which no "
        "forward before it did, so a recompute could not see its old value. Zero the gradients "
        "and run the step again: from now on the old value is kept"
    )


def _changed_in_place(tensor: Tensor, version: int, copy: Tensor | None) -> bool:
    if version_counter(tensor) != version or copy is None or tensor.layout is not torch.strided:
        return version_counter(tensor) != version
    return not same_bits(tensor, copy)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
