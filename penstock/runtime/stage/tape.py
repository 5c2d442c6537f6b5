"""The saved state of one micro-batch on a stage, from its forward to its backward.

forward ──► Tape ──┬──────────────────────────────────────► backward          as a rule
                   ├─► no graph, Conditions ───────► recompute ─► backward          of a stage
                   ├─► emptied slots, segments ───► backward, which recomputes of some layers
                   ├─► emptied slots, away ──► fetch ─────► backward          offload
                   └─► backward_input ──────► parts ──────► backward_weight   a split backward
"""

from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from penstock.model.entries import Entry
from penstock.model.pytree import Structure
from penstock.model.stage_plan import Step
from penstock.model.state import Place
from penstock.runtime.devices import Event
from penstock.runtime.memory.slots import Emptied, LayerInput, Slot, Slots
from penstock.runtime.memory.slots import Layout as SlotLayout
from penstock.runtime.memory.stores import AbstractStore
from penstock.sharding.layouts import Layout
from penstock.transport.channels import Activation

from .split_backward import Division, SplitBackward, divide, split

FROM_CALLER = -1
"""The number in place of a peer stage for values from the caller's batch."""


class StageInput(NamedTuple):
    """An input of the layers: its source (peer, place), its version, and whether it is a copy.

    `before` is a copy of an alias's values, in evaluation.
    """

    key: tuple[int, int]
    tensor: Tensor
    version: int
    copied: bool
    is_alias: bool
    sent: Tensor
    before: Tensor | None


@dataclass(slots=True)
class Conditions:
    """The conditions of a forward that is recomputed, and one result of it to compare."""

    state: dict[Place, Any] = field(default_factory=dict)
    modes: list[bool] = field(default_factory=list)
    weights: list[tuple[int, int, int]] = field(default_factory=list)
    input_versions: list[int] = field(default_factory=list)
    result: tuple[Tensor, int] | None = None


@dataclass(slots=True)
class Segment:
    """A layer to run again: its inputs, the conditions of its forward, and the slots to fill.

    `saved` is the range of the layer's slots among the stage's; `emptied` are these once emptied.
    """

    step: Step
    function: Callable[..., Any]
    inputs: Sequence[LayerInput]
    structure: Structure
    conditions: Conditions
    saved: slice
    emptied: Sequence[Emptied] | None = None
    lock: Lock = field(default_factory=Lock)


@dataclass(slots=True)
class Offloaded:
    """The offloaded values of one micro-batch, and their slots.

    `moved` has for each storage its place in the store, and the slots that are views of it.
    `inputs` are received tensors: (peer, place, slot, number of in-place changes).
    """

    store: AbstractStore
    moved: list[tuple[Any, list[tuple[Slot, SlotLayout]]]] = field(default_factory=list)
    inputs: list[tuple[int, int, Slot, int]] = field(default_factory=list)


@dataclass(slots=True, weakref_slot=True)
class Tape:
    """One micro-batch of a stage between its forward and the end of its backward.

    After `divide`, `backward` leaves weight gradients to `backward_weight`, with the same bits.
    Between the two, `parts` keep the inputs of the heavy operators, the gradients of their
    results, and the gradients of all other parameters.  It is None if the backward is whole.

    `slots` hold autograd's saved tensors, if they may be offloaded or dropped.  `away` has the
    offloaded ones; on a GPU the event `copied` marks their return.

    `dropped_layers` drop their saved tensors; `segments` are the layers that did, in order, until
    slots may call `rerun`.  `variables` is the context of the thread that called autograd.
    `layouts` are, by layer, the layouts of inputs in slices.  `tripwires` are hooks on received
    values with gradient hooks; they raise while layers run.

    `graph_dropped`: the forward kept no graph, and a recompute will build it.  `version` is the
    version of the weights in the forward.  `reruns_in_backward`: the backward may run layers
    again, inside the user's own checkpoint.  With `draws_again` these repeat their random numbers;
    with `must_not_draw` one of them could not.
    """

    microbatch: int
    received: dict[int, Activation]
    graph_dropped: bool
    version: int = 0
    reruns_in_backward: bool = False
    draws_again: bool = False
    must_not_draw: bool = False
    conditions: Conditions | None = None
    layer_marks: list[tuple[int, Step]] = field(default_factory=list)
    entries: dict[int, list[Entry]] = field(default_factory=dict)
    exported: dict[int, list[Tensor]] = field(default_factory=dict)
    output: list[Tensor] = field(default_factory=list)
    output_wants_grad: tuple[bool, ...] = ()
    loss: Tensor | None = None
    parts: SplitBackward | None = None
    dropped_layers: frozenset[int] = frozenset()
    segments: list[Segment] = field(default_factory=list)
    rerun: Callable[["Tape", Segment], None] | None = None
    variables: Context = field(default_factory=copy_context)
    tripwires: list[RemovableHandle] = field(default_factory=list)
    slots: Slots | None = None
    layouts: dict[int, tuple[Layout | None, ...]] = field(default_factory=dict)
    away: Offloaded | None = None
    copied: Event | None = None

    def disarm(self) -> None:
        """Remove the tripwires, once the layers have run."""
        for handle in self.tripwires:
            handle.remove()
        self.tripwires.clear()

    @property
    def may_rerun(self) -> bool:
        """True if the backward may run layers again."""
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
        """The results of the forward: exported leaves, outputs and the loss."""
        exported = chain.from_iterable(self.exported.values())
        return [*exported, *self.output, *([] if self.loss is None else [self.loss])]

    @property
    def waiting(self) -> list[Tensor]:
        """The tensors that `backward` keeps for `backward_weight`."""
        return [] if self.parts is None else self.parts.waiting

    def drop_graph(self) -> None:
        """Free the graph's leaves and roots; keep the state that a recompute needs."""
        self.entries, self.exported, self.output, self.loss = {}, {}, [], None

    def divide(self, roots: Sequence[Tensor]) -> Division:
        """Split the backward in two parts if possible; return the division of the graph."""
        entries = [e for of_peer in self.entries.values() for e in of_peer if e.node is not None]
        division = divide(roots, {entry.node for entry in entries})
        self.parts = split(division, entries)
        return division

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run autograd once from all roots: entries catch their gradients, weights add theirs."""
        if self.parts is None:
            torch.autograd.backward(roots, gradients)
        else:
            self.parts.run_input(roots, gradients)

    def backward_weight(self) -> None:
        """Add the weight gradients that `backward` left, unless this was done already."""
        if self.parts is not None:
            self.parts.run_weights()
            self.parts = None
