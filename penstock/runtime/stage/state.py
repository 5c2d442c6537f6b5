"""Watch state that layers change: buffers, and tensors that modules hold as plain attributes.

changed by a forward    keep the old value, for the recompute
changed by a backward   refuse it, if a forward of a later micro-batch has run already
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import RecomputeError, StateError
from penstock.model.entries import version_of
from penstock.model.state import ABSENT, Place, attributes, read_state
from penstock.runtime.run import Run
from penstock.torch_private import buffers_of, version_counter

from .guards import Context, same_bits
from .tape import Tape
from .weights import Weights


class ChangingState:
    """Finds the state that a stage's forwards change, and keeps the old values for recomputes.

    The first forward in a combination of training modes copies all state and compares it: some
    kernels (BatchNorm's) change a buffer without a new version.  Later forwards copy only state
    that changed in place before.  A buffer may be None, or not exist yet.

    `known_in` are the modes of the last first forward.  In these modes a stage without buffers and
    `attributes` has no state.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self.attributes = attributes(modules)
        self.known_in: list[bool] | None = None
        self._copied: set[Place] = set()

    def look(self, modes: list[bool]) -> dict[Place, Any]:
        """Return the tensor at each place, its version, and a copy if it may change in place."""
        is_new = modes != self.known_in  # a layer may change other state in other modes
        before = read_state(self._modules, self.attributes)
        return {
            place: (
                tensor,
                version_counter(tensor),
                tensor.detach().clone() if is_new or place in self._copied else None,
            )
            if tensor is not None
            else (None, 0, None)
            for place, tensor in before.items()
        }

    def changed(self, before: dict[Place, Any], modes: list[bool]) -> dict[Place, Any]:
        """Return the old values of state that the forward changed, in place or by assignment.

        A RecomputeError: no earlier forward changed that tensor in place; the old value is lost.
        """
        if modes != self.known_in:
            self.attributes = attributes(self._modules)
            self._copied, self.known_in = set(), modes
        # State that is new was absent before; state with another version or other bits changed in
        # place; a place with another tensor was assigned.
        now = read_state(self._modules, self.attributes)
        old: dict[Place, Any] = dict.fromkeys(now.keys() - before.keys(), ABSENT)
        for place, (tensor, version, copy) in before.items():
            if tensor is not None and (
                place in self._copied or _changed_in_place(tensor, version, copy)
            ):
                self._copied.add(place)
                if copy is None:
                    module, is_buffer, name = place
                    kind = "buffer" if is_buffer else "attribute"
                    raise RecomputeError(
                        f"the forward changed {kind} {name!r} of a {type(module).__name__} in "
                        "place, which no forward before it did, so a recompute could not see its "
                        "old value. Zero the gradients and run the step again: from now on the "
                        "old value is kept"
                    )
                old[place] = copy
            elif now.get(place) is not tensor:
                old[place] = tensor
        return old


def _changed_in_place(tensor: Tensor, version: int, copy: Tensor | None) -> bool:
    if version_counter(tensor) != version or copy is None or tensor.layout is not torch.strided:
        return version_counter(tensor) != version
    return not same_bits(tensor, copy)


Versions = dict[Place, tuple[Tensor, int]]


class BackwardState:
    """Refuses state that the backward of a micro-batch changes out of order.

    The unsplit model runs the backward of a micro-batch before the forward of the next.  Gradients
    do not depend on that, but what a backward writes and a forward reads does:

        unsplit    F0 B0 F1 B1 F2 B2        F1 reads what B0 wrote
        gpipe      F0 F1 F2 B0 B1 B2        F1 reads what was there before the step

    A backward may assign an attribute: hooks store values there, and so do forwards that the
    user's own checkpoint runs again.  Parameters are watched too: an optimizer that steps in a
    hook changes them, and autograd saves no bias or table by which it would notice.
    """

    def __init__(self, stage: int, modules: Sequence[nn.Module], weights: Weights) -> None:
        self._stage, self._modules, self._weights = stage, modules, weights

    @cached_property  # asked after the first forward: layers may make state there
    def _attributes(self) -> list[Place]:
        return attributes(self._modules)

    @cached_property
    def _holders(self) -> list[nn.Module]:
        return [m for m in self._modules if list(buffers_of(m).items())]

    @property
    def is_idle(self) -> bool:
        """True if the stage has no state to watch; known after the first forward."""
        return not (self._holders or self._attributes or self._weights.are_hooked)

    def around_backward(self, run: Run, tape: Tape) -> Context | None:
        """Compare state before and after, if a forward of a later micro-batch has run."""
        ran = run.stages[self._stage].tapes
        early = any(other > tape.microbatch for other in ran)
        return self._comparing() if early else None

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        before, weights = self._versions(), self._weights.changes
        yield
        self._check_unchanged(before)
        for (was, _), (now, weight) in zip(weights, self._weights.changes, strict=False):
            if was != now:
                raise StateError(
                    f"the backward of stage {self._stage} changed a parameter of shape "
                    f"{tuple(weight.shape)} in place, after forwards of later micro-batches had "
                    "run with its old values: an optimizer that steps in a hook does this, and "
                    "the gradients would be of a mixture of both. The parameters may be half "
                    "updated: load a checkpoint; call optimizer.step() after train_step, or train "
                    "with num_microbatches=1"
                )

    def _versions(self) -> Versions:
        now = read_state(self._holders, self._attributes)
        return {p: (tensor, version_of(tensor)) for p, tensor in now.items() if tensor is not None}

    def _check_unchanged(self, before: Versions) -> None:
        """Raise StateError if a tensor was changed in place since, or a buffer was replaced."""
        for place, (tensor, version) in self._versions().items():
            module, is_buffer, name = place
            old, old_version = before.get(place, (None, 0))
            is_replaced = tensor is not old
            if is_replaced and not is_buffer:
                continue
            if is_replaced or version != old_version:
                raise StateError(
                    f"the backward of a {type(module).__name__} changed its "
                    f"{'buffer' if is_buffer else 'attribute'} {name!r}, after forwards of later "
                    "micro-batches had run. If a forward reads it (amax of fp8, say), its values "
                    "depend on the order of forwards and backwards, that is on the schedule, and "
                    "would not be the unsplit model's. Zero the gradients; move the update to a "
                    "forward, or train with num_microbatches=1. If it was a forward that a "
                    "checkpoint runs again, use recompute=Recompute.STAGE instead of the "
                    "checkpoint; if no forward reads it, keep it in a dictionary of the module"
                )
