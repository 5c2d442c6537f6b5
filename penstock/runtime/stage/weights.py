"""The parameters of a stage, and which version of them a forward has seen."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.model.entries import version_of
from penstock.model.owned import NOTHING, Between, Slot
from penstock.torch_private import (
    gradient_hooks,
    parameters_of,
    uncounted_changes,
    version_counter,
)

Version = list[tuple[int, int, int]]
"""What tells a version of all weights from every other: which they are, how often each was changed
in place, and where it lies: an assigned `.data` moves."""

_NONE = -1


@dataclass(frozen=True, slots=True)
class Owned:
    """What one stage owns: all that its `modules` have, the loss's included, and what is between
    them.
    """

    modules: tuple[nn.Module, ...]
    between: Between = NOTHING

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters that are here now; each once."""
        of_modules = (p for m in self.modules for p in m.parameters())
        return list(dict.fromkeys((*of_modules, *_standing(self.between.parameters))))

    @property
    def buffers(self) -> list[Tensor]:
        """All buffers that are here now; each once."""
        of_modules = (b for m in self.modules for b in m.buffers())
        return list(dict.fromkeys((*of_modules, *_standing(self.between.buffers))))

    @property
    def everyone(self) -> list[nn.Module]:
        """The modules and all that are inside them; each once."""
        return list(dict.fromkeys(m for root in self.modules for m in root.modules()))


def _standing(slots: Sequence[Slot]) -> Iterator[Tensor]:
    return (held[name] for held, name in slots if isinstance(held.get(name), Tensor))


class Weights:
    """The parameters that a stage owns, and older versions of them.

    Of a synchronous schedule there is one version, number 0.  Others update weights while tapes of
    earlier forwards are left: a parameter then moves to other memory before it changes, and what
    autograd saved stays behind.  `show` puts a version in its place for as long as layers, or
    autograd, work with it.  In the end each parameter is where it was at the start.

        version   0: [memory a]   ──► copy ──►   1: [memory b]   ──► copy ──►   2: [memory a]
                  in use until its last tape                     a is free again
    """

    def __init__(self, owned: Owned) -> None:
        self.owned, self._holders = owned, owned.everyone
        self.number = 0
        """How many updates the newest version has seen in this run."""
        self._shown = 0
        self._moving: Sequence[Tensor] = ()
        self._elsewhere: Collection[Tensor] = ()
        self._uses: Counter[int] = Counter()
        self._memory: dict[int, list[Tensor]] = {}
        self._home: list[Tensor] = []
        self._free: list[list[Tensor]] = []

    @property
    def shown(self) -> Version:
        """The version that layers see now; they are sent those weights that move elsewhere."""
        return [(id(p), version_counter(p), p.data_ptr()) for p in self._seen()]

    @property
    def changes(self) -> list[tuple[int, Tensor]]:
        """How often each parameter was changed in place, and the parameter."""
        return [(version_of(p), p) for p in self._seen()]

    @property
    def are_hooked(self) -> bool:
        """Whether something runs when the gradient of one is found or added."""
        return any(map(any, map(gradient_hooks, self._seen())))

    def _seen(self) -> list[Tensor]:
        found: list[Tensor | None] = []
        for module in self._holders:
            found += parameters_of(module).values()
        for held, name in self.owned.between.parameters:
            found.append(held.get(name))
        return [p for p in found if p is not None and p not in self._elsewhere]

    @property
    def bytes_of_older(self) -> int:
        """Bytes of the versions beside the newest."""
        older = [memory for number, memory in self._memory.items() if number != self.number]
        return sum(t.numel() * t.element_size() for memory in older for t in memory)

    def holds(self, version: Version) -> bool:
        """Tell whether what a forward saw is still here, for its recompute and its backward."""
        return version == self.shown

    def show(self, number: int) -> None:
        """Let the parameters have the values that they had after `number` updates."""
        if number != self._shown:
            self._put(self._memory[number])
            self._shown = number

    def begin(
        self, moving: Sequence[Tensor], elsewhere: Collection[Tensor], uses: Counter[int]
    ) -> None:
        """Begin a run in which the parameters `moving` are updated, and those `elsewhere` by other
        stages; `uses` counts the forwards that see each version.
        """
        self._uses = uses.copy()
        self._elsewhere, self._moving, self._home = elsewhere, moving, [p.data for p in moving]
        self.number, self._shown, self._memory = 0, 0, {0: self._home}

    def update(self, step: Callable[[int], None]) -> None:
        """Make a new version by `step`, which moves the parameters in place; keep the one before
        if tapes or later forwards need it.
        """
        self.show(self.number)
        keeps = self._uses[self.number] > 0
        moving, before = self._moving, self._memory[self.number]
        if keeps:
            after = self._free.pop() if self._free else [torch.empty_like(t) for t in before]
            for new, old in zip(after, before, strict=True):
                new.copy_(old)
            self._put(after)
        else:
            after = before
        self._shown = _NONE  # until it is done
        with uncounted_changes(tuple(moving)):
            step(self.number)
        if not keeps:
            del self._memory[self.number]
        self.number += 1
        self._shown, self._memory[self.number] = self.number, after

    def let_go(self, number: int) -> None:
        """Need a version for one tape less; free it with the last, unless it is the newest."""
        self._uses[number] -= 1
        if not self._uses[number] and number != self.number:
            self._free.append(self._memory.pop(number))

    def end(self) -> None:
        """Leave the newest version where the parameters were at the start; keep no other."""
        if not self._memory:
            return
        self.show(self.number)
        newest = self._memory[self.number]
        if newest is not self._home:
            for home, tensor in zip(self._home, newest, strict=True):
                home.copy_(tensor)
            self._put(self._home)
        if self.number and self._moving:
            torch.autograd.graph.increment_version(self._moving)
        self._moving, self._home, self._memory, self._free = (), [], {}, []
        self._elsewhere = ()
        self.number = self._shown = 0

    def _put(self, memory: Sequence[Tensor]) -> None:
        for parameter, data in zip(self._moving, memory, strict=True):
            parameter.data = data
