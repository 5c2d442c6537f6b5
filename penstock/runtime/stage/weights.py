"""Hold the parameters of a stage, and older versions of them for asynchronous schedules."""

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
"""(id, version counter, address) of each weight; an assignment to `.data` changes the address."""

_NONE = -1


@dataclass(frozen=True, slots=True)
class Owned:
    """The tensors of one stage: in its `modules`, the loss's included, and `between` them."""

    modules: tuple[nn.Module, ...]
    between: Between = NOTHING

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that the stage has now, each once."""
        of_modules = (p for m in self.modules for p in m.parameters())
        return list(dict.fromkeys((*of_modules, *_standing(self.between.parameters))))

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers that the stage has now, each once."""
        of_modules = (b for m in self.modules for b in m.buffers())
        return list(dict.fromkeys((*of_modules, *_standing(self.between.buffers))))

    @property
    def everyone(self) -> list[nn.Module]:
        """The modules and all modules inside them, each once."""
        return list(dict.fromkeys(m for root in self.modules for m in root.modules()))


def _standing(slots: Sequence[Slot]) -> Iterator[Tensor]:
    return (held[name] for held, name in slots if isinstance(held.get(name), Tensor))


class Weights:
    """The parameters that a stage owns, and older versions of them.

    A synchronous schedule has one version, number 0.  Other schedules update weights while tapes
    of earlier forwards exist.  A parameter then moves to other memory before it changes, and
    autograd's saved tensors stay in the old memory.  `show` points the parameters at a version
    while layers or autograd use it.  In the end each parameter is back in its first memory.

        version   0: [memory a]   ──► copy ──►   1: [memory b]   ──► copy ──►   2: [memory a]
                  in use until its last tape                     a is free again
    """

    def __init__(self, owned: Owned) -> None:
        self.owned, self._holders = owned, owned.everyone
        self.number = 0
        """The number of updates of the newest version in this run."""
        self._shown = 0
        self._moving: Sequence[Tensor] = ()
        self._elsewhere: Collection[Tensor] = ()
        self._uses: Counter[int] = Counter()
        self._memory: dict[int, list[Tensor]] = {}
        self._home: list[Tensor] = []
        self._free: list[list[Tensor]] = []

    @property
    def shown(self) -> Version:
        """The version that layers see now, without weights that other stages update."""
        return [(id(p), version_counter(p), p.data_ptr()) for p in self._seen()]

    @property
    def changes(self) -> list[tuple[int, Tensor]]:
        """The version counter of each parameter, and the parameter."""
        return [(version_of(p), p) for p in self._seen()]

    @property
    def are_hooked(self) -> bool:
        """True if a parameter has a hook on its gradient."""
        return any(map(any, map(gradient_hooks, self._seen())))

    def _seen(self) -> list[Tensor]:
        parameters: list[Tensor | None] = []
        for module in self._holders:
            parameters += parameters_of(module).values()
        for held, name in self.owned.between.parameters:
            parameters.append(held.get(name))
        return [p for p in parameters if p is not None and p not in self._elsewhere]

    @property
    def bytes_of_older(self) -> int:
        """Bytes of all versions but the newest."""
        older = [memory for number, memory in self._memory.items() if number != self.number]
        return sum(t.numel() * t.element_size() for memory in older for t in memory)

    def holds(self, version: Version) -> bool:
        """Tell whether the version of a forward is still shown."""
        return version == self.shown

    def show(self, number: int) -> None:
        """Point the parameters at their values after `number` updates."""
        if number != self._shown:
            self._put(self._memory[number])
            self._shown = number

    def begin(
        self, moving: Sequence[Tensor], elsewhere: Collection[Tensor], uses: Counter[int]
    ) -> None:
        """Begin a run that updates the parameters `moving` here, and `elsewhere` on other stages.

        `uses` counts the forwards that see each version.
        """
        self._uses = uses.copy()
        self._elsewhere, self._moving, self._home = elsewhere, moving, [p.data for p in moving]
        self.number, self._shown, self._memory = 0, 0, {0: self._home}

    def update(self, step: Callable[[int], None]) -> None:
        """Make a new version by `step`, which changes the parameters in place.

        Keep the version before if tapes or later forwards need it: `step` then works on a copy.
        """
        # 1. Copy the newest version if tapes need it: `step` changes memory in place.
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

        # 2. Update without counting: autograd's saved tensors are in the old memory.
        self._shown = _NONE  # an error in `step` leaves no valid version
        with uncounted_changes(tuple(moving)):
            step(self.number)

        # 3. Publish the new version.
        if not keeps:
            del self._memory[self.number]
        self.number += 1
        self._shown, self._memory[self.number] = self.number, after

    def let_go(self, number: int) -> None:
        """Count one use of a version less; free it after the last, unless it is the newest."""
        self._uses[number] -= 1
        if not self._uses[number] and number != self.number:
            self._free.append(self._memory.pop(number))

    def end(self) -> None:
        """Copy the newest version into the parameters' first memory; free all others."""
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
