"""Find out what state of a stage its forward changes, and keep what each forward saw."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import RecomputeError
from penstock.model.state import ABSENT, Place, attributes, read_state
from penstock.torch_private import version_counter

from .boundary import same_bits


class ChangingState:
    """Finds out what state of a stage its forward changes, and keeps what each forward saw.

    State are buffers, and tensors that a module holds as plain attributes.  The first forward in
    some training modes keeps a copy of everything and compares it, since some kernels (that of
    BatchNorm) change a buffer without a new version; from then on only what was seen to change in
    place is copied.  A buffer may be None, or not be there yet.

    `known_in` are the modes of the last first forward; in these, without `attributes` and buffers
    there is nothing to look at.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self.attributes = attributes(modules)
        self.known_in: list[bool] | None = None
        self._copied: set[Place] = set()

    def look(self, modes: list[bool]) -> dict[Place, Any]:
        """Return what stands at each place, its version, and a copy if it may change in place."""
        is_new = modes != self.known_in  # what a layer leaves alone in one mode it may change here
        before = read_state(self._modules, self.attributes)
        return {
            place: (
                tensor,
                version_counter(tensor),
                _copy(tensor) if is_new or place in self._copied else None,
            )
            if tensor is not None
            else (None, 0, None)
            for place, tensor in before.items()
        }

    def changed(self, before: dict[Place, Any], modes: list[bool]) -> dict[Place, Any]:
        """Return the old values of what the forward changed, in place or by another tensor.

        Raises:
            RecomputeError: it changed a tensor in place that no earlier forward changed, so the
                old value is lost.
        """
        if modes != self.known_in:
            self.attributes = attributes(self._modules)
            self._copied, self.known_in = set(), modes
        now = read_state(self._modules, self.attributes)
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
