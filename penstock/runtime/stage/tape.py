"""What the forward of one micro-batch leaves behind, for its backward to use up.

forward ──► Tape ──┬──────────────────────────────────────► backward          as a rule
                   ├─► no graph, Seen ───────► recompute ─► backward          of a stage
                   ├─► emptied slots, reruns ► recompute ─► backward          of some layers
                   ├─► emptied slots, away ──► fetch ─────► backward          offload
                   └─► backward_input ──────► parts ──────► backward_weight   a split backward
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from penstock.model.entries import Entry
from penstock.model.pytree import Structure
from penstock.model.stage_plan import Step
from penstock.model.state import Place
from penstock.runtime.devices import Event
from penstock.runtime.memory.slots import Emptied, Slot, Slots
from penstock.runtime.memory.slots import Layout as SlotLayout
from penstock.runtime.memory.stores import AbstractStore
from penstock.sharding.layouts import Layout
from penstock.transport.channels import Activation

from .split_backward import Division, SplitBackward, divide, split

FROM_CALLER = -1
"""Stands where a peer stage stands, for values that come from the caller's batch."""


class Given(NamedTuple):
    """A tensor given to the layers: where from, its version then, whether it is a copy.

    `before` is what an alias held in an evaluation.
    """

    key: tuple[int, int]
    tensor: Tensor
    version: int
    copied: bool
    is_alias: bool
    sent: Tensor
    before: Tensor | None


@dataclass(slots=True)
class Seen:
    """What a forward saw that is recomputed: changing state, training modes, versions of weights
    and inputs; and one of its results, with its version, for the recompute to give again.
    """

    state: dict[Place, Any]
    modes: list[bool]
    weights: list[tuple[int, int, int]]
    input_versions: list[int]
    result: tuple[Tensor, int] | None = None


class LayerInput(NamedTuple):
    """A tensor that a layer was given: in a slot, or as it was where it lasts longer."""

    kept: Slot | Tensor
    wants_grad: bool

    @property
    def is_as_given(self) -> bool:
        """Whether it was not changed in place since."""
        return isinstance(self.kept, Tensor) or self.kept.is_as_saved


@dataclass(slots=True)
class Rerun:
    """A layer that is to run again: its inputs, the slots to fill, and what it gave, if that is to
    be compared.

    `saved` says which slots of the stage are the layer's; they are in `emptied` once they are.
    """

    step: Step
    function: Callable[..., Any]
    inputs: Sequence[LayerInput]
    structure: Structure
    saved: slice
    result: tuple[Tensor, int] | None
    emptied: Sequence[Emptied] | None = None


@dataclass(slots=True)
class Away:
    """Values of one micro-batch that were moved to a store, and where they belong.

    `moved` has for each storage its place there, and the slots that are views of it.  `inputs` are
    received tensors: (peer, place, slot, how often it had been changed).
    """

    store: AbstractStore
    moved: list[tuple[Any, list[tuple[Slot, SlotLayout]]]] = field(default_factory=list)
    inputs: list[tuple[int, int, Slot, int]] = field(default_factory=list)


@dataclass(slots=True)
class Tape:
    """One micro-batch of a stage between its forward and the end of its backward.

    The backward is one; or, after `divide`, `backward` leaves the gradients of weights to
    `backward_weight`, with the same bits in all of them.  Between the two, `parts` keep the inputs
    of the operators that weigh most, the gradients of their results, and those of all other
    parameters.  It is None where a backward has to be one.

    `slots` hold what autograd saved, where it is to be moved; `away` is what is elsewhere now, and
    `copied` marks on a GPU when it is back.

    `dropped_layers` drop what they have saved, and `reruns` are those that have, in order.
    `layouts` say by layer what it was given in slices.
    `tripwires` are on what came with hooks on its gradient, and raise while layers run.

    `graph_dropped`: the forward kept no graph, and a recompute will build it.  `version` is that
    of the weights which the forward has seen.
    `reruns_in_backward`: the backward may run layers again, inside a checkpoint of the user's own.
    With `draws_again` these draw the numbers again that they drew; with `must_not_draw` one of
    them could not.
    """

    microbatch: int
    received: dict[int, Activation]
    graph_dropped: bool
    version: int = 0
    reruns_in_backward: bool = False
    draws_again: bool = False
    must_not_draw: bool = False
    seen: Seen | None = None
    layer_marks: list[tuple[int, Step]] = field(default_factory=list)
    entries: dict[int, list[Entry]] = field(default_factory=dict)
    exported: dict[int, list[Tensor]] = field(default_factory=dict)
    output: list[Tensor] = field(default_factory=list)
    output_wants_grad: tuple[bool, ...] = ()
    loss: Tensor | None = None
    parts: SplitBackward | None = None
    dropped_layers: frozenset[int] = frozenset()
    reruns: list[Rerun] = field(default_factory=list)
    tripwires: list[RemovableHandle] = field(default_factory=list)
    slots: Slots | None = None
    layouts: dict[int, tuple[Layout | None, ...]] = field(default_factory=dict)
    away: Away | None = None
    copied: Event | None = None

    def disarm(self) -> None:
        """Let gradients be computed again, once the layers have run."""
        for handle in self.tripwires:
            handle.remove()
        self.tripwires.clear()

    @property
    def may_rerun(self) -> bool:
        """Whether the backward may run layers again."""
        return self.reruns_in_backward or self.draws_again

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors that the stage received."""
        return list(chain.from_iterable([a.leaves for a in self.received.values()]))

    @property
    def entry_tensors(self) -> list[Tensor]:
        """The leaves of the stage's own graph that stand for what it received."""
        return [entry.tensor for entries in self.entries.values() for entry in entries]

    @property
    def results(self) -> list[Tensor]:
        """All that the forward gave."""
        exported = chain.from_iterable(self.exported.values())
        return [*exported, *self.output, *([] if self.loss is None else [self.loss])]

    @property
    def waiting(self) -> list[Tensor]:
        """All that `backward` has left to `backward_weight`."""
        return [] if self.parts is None else self.parts.waiting

    def drop_graph(self) -> None:
        """Keep only what a recompute needs."""
        self.entries, self.exported, self.output, self.loss = {}, {}, [], None

    def divide(self, roots: Sequence[Tensor]) -> Division:
        """Let `backward` leave to `backward_weight` what can be left; return what was decided."""
        every = [e for entries in self.entries.values() for e in entries if e.node is not None]
        division = divide(roots, {entry.node for entry in every})
        self.parts = split(division, every)
        return division

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run autograd once from all roots: entries catch their gradients, weights add theirs."""
        if self.parts is None:
            torch.autograd.backward(roots, gradients)
        else:
            self.parts.run_input(roots, gradients)

    def backward_weight(self) -> None:
        """Let weights add the gradients that `backward` has left, if there are any still."""
        if self.parts is not None:
            self.parts.run_weights()
            self.parts = None
