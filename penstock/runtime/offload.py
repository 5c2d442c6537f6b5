"""Move what a forward keeps out of the device's memory, and back before it is needed.

    slots, inputs ──► each storage once ──► a file, or the host's memory ──► slots, inputs

Where the graph is kept, the values that came to the stage and that left it are given up for good:
autograd has saved what it needs of them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from penstock.errors import OffloadError
from penstock.model.entries import lasts, version_of
from penstock.torch_private import storage_id, version_counter

from .memory import Lasting
from .run import Run
from .slots import Layout, Slot, Slots, without_values
from .stores import AbstractStore
from .tape import FROM_CALLER, Tape


class _Input(NamedTuple):
    """A received tensor that was moved away: where from, and how often it had been changed."""

    peer: int
    place: int
    slot: Slot
    changes: int


class Offloading:
    """Moves away what a stage keeps; `make_store` makes a store for one run."""

    def __init__(
        self, stage: int, lasting: Lasting, make_store: Callable[[], AbstractStore]
    ) -> None:
        self._stage, self._lasting, self._make_store = stage, lasting, make_store

    def offload(self, run: Run, tape: Tape) -> None:
        """Move what is kept of a micro-batch away.

        Raises:
            OffloadError: there is no room for it.
        """
        slots = tape.slots or Slots(self._lasting.of(run, tape))
        here = run.stages[self._stage]
        here.store = here.store or self._make_store()
        try:
            tape.away = Away(here.store)
            if tape.graph_dropped:  # its inputs are all there is
                tape.away.move_inputs(tape, slots)
            else:
                tape.away.move(slots)
                _give_up_ends(tape, slots)
        except OSError as error:
            raise OffloadError(
                f"stage {self._stage} cannot move away what it keeps of micro-batch "
                f"{tape.microbatch}: {error.strerror or error}. Give offload_folder= a folder on "
                "a disk with more room, or keep more in memory: recompute=Recompute.STAGE, or "
                "more micro-batches"
            ) from error

    def fetch(self, tape: Tape) -> None:
        """Bring back what `offload` moved away.

        Raises:
            OffloadError: it cannot be read.
        """
        away, tape.away = tape.away, None
        assert away is not None
        try:
            away.bring_back(tape)
        except OSError as error:
            raise OffloadError(
                f"stage {self._stage} cannot bring back what it kept of micro-batch "
                f"{tape.microbatch}: {error.strerror or error}"
            ) from error


class Away:
    """What was moved away of one micro-batch, and where it belongs."""

    def __init__(self, store: AbstractStore) -> None:
        self._store = store
        self._moved: list[tuple[Any, list[tuple[Slot, Layout]]]] = []
        self._inputs: list[_Input] = []

    def move(self, slots: Iterable[Slot]) -> None:
        """Empty slots into the store, each storage once; what was changed in place stays."""
        by_storage: dict[int, list[tuple[Slot, Tensor]]] = {}
        for slot in slots:
            if slot.tensor is not None and slot.is_as_saved:
                by_storage.setdefault(storage_id(slot.tensor), []).append((slot, slot.tensor))
        for views in by_storage.values():
            place = self._store.put(views[0][1].untyped_storage())
            self._moved.append((place, [(slot, Layout.of(tensor)) for slot, tensor in views]))
            for slot, _ in views:
                slot.tensor = None

    def move_inputs(self, tape: Tape, slots: Slots) -> None:
        """Empty what a tape has received into the store."""
        for peer, place, leaf in _received(tape, slots):
            changes = version_of(leaf) - tape.received[peer].versions[place]
            self._inputs.append(_Input(peer, place, Slot(leaf), changes))
            _put_leaf(tape, peer, place, without_values(leaf.detach()))
        self.move(each.slot for each in self._inputs)

    def bring_back(self, tape: Tape) -> None:
        """Fill the slots, and what the tape has received, with the same bits."""
        for place, views in self._moved:
            storage, lead = self._store.get(place)
            for slot, layout in views:
                slot.fill(layout.view(storage, lead))
        for peer, place, slot, changes in self._inputs:
            assert slot.tensor is not None
            _put_leaf(tape, peer, place, slot.tensor, changes)
        if tape.seen is not None and self._inputs:
            tape.seen.input_versions = [version_counter(leaf) for leaf in tape.inputs]


def _received(tape: Tape, slots: Slots) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (peer, place, tensor) of what came from other stages and may move."""
    for peer in tape.received.keys() - {FROM_CALLER}:
        for place, leaf in enumerate(tape.received[peer].leaves):
            if slots.may_move(leaf):
                yield peer, place, leaf


def _put_leaf(tape: Tape, peer: int, place: int, leaf: Tensor, changes: int = 0) -> None:
    """Let a tape have received another tensor, which was changed so often since it was sent."""
    activation = tape.received[peer]
    leaves, versions = list(activation.leaves), list(activation.versions)
    leaves[place], versions[place] = leaf, version_of(leaf) - changes
    tape.received[peer] = replace(activation, leaves=tuple(leaves), versions=tuple(versions))


def _give_up_ends(tape: Tape, slots: Slots) -> None:
    """Let go of the values of what came and what left: only their gradients are still to come."""
    for peer, place, leaf in list(_received(tape, slots)):
        empty = without_values(leaf.detach())
        _put_leaf(tape, peer, place, empty)
        entry = tape.entries[peer][place]
        if entry.node is None:
            entry.tensor = empty
        else:
            entry.tensor.data = empty  # no layer has seen it, see Handover.enter
    for leaves in tape.exported.values():
        leaves[:] = [
            without_values(leaf) if slots.may_move(leaf) and not lasts(leaf) else leaf
            for leaf in leaves
        ]
