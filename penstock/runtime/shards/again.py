"""Weights that are gathered for a layer, freed after it, and gathered again for its backward.

    forward     gather ──► calls of the layer ──► freed: what they save is where it will be
    backward    gather, when the gradient of what the layer gave arrives ──► calls ──► freed

All are gathered at once, and so in one order on all devices; at what time a saved one is wanted
differs, since kernels on empty slices save other things.  (ZeRO's third stage, Rajbhandari et al.
2020, section 5.3.)
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.torch_private import saving_hooks, storage_id

from .convert import convert


class Again:
    """Weights of one call of a layer that its backward wants again; each is freed with the last
    node that has saved it.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, _Whole]] = {}
        self._gathered: list[weakref.ref[_Whole]] = []
        self._hows: list[tuple[Any, ...]] = []
        around: tuple[Callable[[Any], Any], ...] = saving_hooks() or (_same, _same)
        self._pack, self._unpack = around

    def note(self, made: Tensor, how: tuple[Any, ...]) -> None:
        """Note what a weight was converted to: memory of its own."""
        if made is not how[0]:
            whole = _Whole()
            self._made[storage_id(made)] = made, whole
            self._hows.append(how)
            self._gathered.append(weakref.ref(whole))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Save no such conversion."""
        with saved_tensors_hooks(self._packed, self._unpacked):
            yield
        self._made.clear()

    def before_backward(self, results: Sequence[Any]) -> None:
        """Gather them when the gradient of one of these comes."""
        for tensor in results:
            if isinstance(tensor, Tensor) and tensor.requires_grad and self._hows:
                tensor.register_hook(self._gather)

    def _gather(self, gradient: Tensor) -> None:
        hows, self._hows = self._hows, []
        for (local, *how), gathered in zip(hows, self._gathered, strict=bool(hows)):
            made = convert(local.detach(), *how)
            whole = gathered()
            if whole is not None:
                whole.tensor = made

    def _packed(self, tensor: Tensor) -> Any:
        found = self._made.get(storage_id(tensor))
        if found is None:
            return self._pack(tensor)
        return _Saved(found[1], (tensor.shape, tensor.stride(), tensor.storage_offset()))

    def _unpacked(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            found: Tensor = self._unpack(saved)
            return found
        assert saved.whole.tensor is not None, "a backward that began inside a layer"
        return saved.whole.tensor.as_strided(*saved.place)


class _Whole:
    """A weight that will be gathered again."""

    tensor: Tensor | None = None


class _Saved(NamedTuple):
    """Where in a weight that is gathered again a saved tensor lies."""

    whole: _Whole
    place: tuple[Any, ...]


def _same(value: Any) -> Any:
    return value
