"""Offload the activations of a micro-batch, and fetch them before the backward.

    slots, inputs ──► each storage once ──► a file, or the host's memory ──► slots, inputs

With a graph, the values that entered and left the stage are freed for good: autograd has saved the
tensors that it needs.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from penstock.errors import OffloadError
from penstock.model.entries import lasts, version_of
from penstock.model.pytree import flatten
from penstock.runtime.run import Run
from penstock.runtime.stage.guards import Context, LayersGuard
from penstock.runtime.stage.tape import FROM_CALLER, Offloaded, Tape
from penstock.runtime.stage.weights import Owned
from penstock.torch_private import storage_id, version_counter

from .slots import Layout, Slot, Slots, without_values
from .stores import AbstractStore


class OutlivingTensors:
    """The tensors that outlive a tape: parameters, also of other stages, buffers, the batch."""

    def __init__(self, owned: Owned, computes_loss: bool) -> None:
        self._owned = owned
        self._computes_loss = computes_loss

    def of(self, run: Run, tape: Tape) -> list[Tensor]:
        """Return these tensors for one micro-batch, as they are now."""
        owned = [*self._owned.parameters, *self._owned.buffers]
        sent = [a.leaves[place] for a in tape.received.values() for place in a.lasting]
        return owned + sent + self.of_batch(run, tape)

    def of_batch(self, run: Run, tape: Tape) -> list[Tensor]:
        """Return the views of the caller's batch that the stage uses."""
        leaves = list(tape.received[FROM_CALLER].leaves) if FROM_CALLER in tape.received else []
        if self._computes_loss and run.loss is not None:
            leaves += flatten(run.batch.targets[tape.microbatch])[0]
        return leaves


class Slotting(LayersGuard):
    """Lets autograd save into slots, in the forwards of a stage that offloads or drops them."""

    def __init__(self, outliving: OutlivingTensors) -> None:
        self._outliving = outliving

    def around_forward(self, run: Run, tape: Tape) -> Context | None:
        """Save into slots, if autograd saves tensors."""
        if not run.caller.with_grad or tape.graph_dropped:
            return None
        tape.slots = Slots(self._outliving.of(run, tape))
        return tape.slots.hooks()


class Offloading:
    """Offloads the activations of a stage; `make_store` makes a store for one run."""

    def __init__(
        self, stage: int, outliving: OutlivingTensors, make_store: Callable[[], AbstractStore]
    ) -> None:
        self._stage, self._outliving, self._make_store = stage, outliving, make_store

    def offload(self, run: Run, tape: Tape) -> None:
        """Move the activations of a micro-batch to the store; OffloadError if it has no room."""
        slots = tape.slots or Slots(self._outliving.of(run, tape))
        here = run.stages[self._stage]
        here.store = here.store or self._make_store()
        try:
            tape.away = Offloaded(here.store)
            if tape.graph_dropped:  # the tape has inputs only
                # The number of in-place changes stays: later checks of versions need it.
                for peer, place, leaf in _received(tape, slots):
                    changes = version_of(leaf) - tape.received[peer].versions[place]
                    tape.away.inputs.append((peer, place, Slot(leaf), changes))
                    _put_leaf(tape, peer, place, without_values(leaf.detach()))
                _move(tape.away, (slot for _, _, slot, _ in tape.away.inputs))
            else:
                # Autograd has saved what it needs in slots; entries and exports keep their shape.
                _move(tape.away, slots)
                _give_up_ends(tape, slots)
        except OSError as error:
            raise OffloadError(
                f"stage {self._stage} cannot move away what it keeps of micro-batch "
                f"{tape.microbatch}: {error.strerror or error}. Give offload_folder= a folder on "
                "a disk with more room, or keep more in memory: recompute=Recompute.STAGE, or "
                "more micro-batches"
            ) from error

    def fetch(self, tape: Tape) -> None:
        """Bring back a micro-batch's activations; OffloadError if the store cannot be read."""
        away, tape.away = tape.away, None
        assert away is not None
        try:
            for place, views in away.moved:
                storage, lead = away.store.get(place)
                for slot, layout in views:
                    slot.fill(layout.view(storage, lead))
        except OSError as error:
            raise OffloadError(
                f"stage {self._stage} cannot bring back what it kept of micro-batch "
                f"{tape.microbatch}: {error.strerror or error}"
            ) from error
        for peer, position, slot, changes in away.inputs:
            assert slot.tensor is not None
            _put_leaf(tape, peer, position, slot.tensor, changes)
        if tape.conditions is not None and away.inputs:
            tape.conditions.input_versions = [version_counter(leaf) for leaf in tape.inputs]


def _move(away: Offloaded, slots: Iterable[Slot]) -> None:
    """Empty slots into the store, each storage once; tensors changed in place stay."""
    # Several slots may be views of one storage: it moves once, and all views are rebuilt from it.
    by_storage: dict[int, list[tuple[Slot, Tensor]]] = {}
    for slot in slots:
        if slot.tensor is not None and slot.is_as_saved:
            by_storage.setdefault(storage_id(slot.tensor), []).append((slot, slot.tensor))
    for views in by_storage.values():
        place = away.store.put(views[0][1].untyped_storage())
        away.moved.append((place, [(slot, Layout.of(tensor)) for slot, tensor in views]))
        for slot, _ in views:
            slot.tensor = None


def _received(tape: Tape, slots: Slots) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (peer, place, tensor) of the values from other stages that may move."""
    for peer in tape.received.keys() - {FROM_CALLER}:
        for place, leaf in enumerate(tape.received[peer].leaves):
            if slots.may_move(leaf):
                yield peer, place, leaf


def _put_leaf(tape: Tape, peer: int, place: int, leaf: Tensor, changes: int = 0) -> None:
    """Replace a received tensor by `leaf`, with `changes` in-place changes since its send."""
    activation = tape.received[peer]
    leaves, versions = list(activation.leaves), list(activation.versions)
    leaves[place], versions[place] = leaf, version_of(leaf) - changes
    tape.received[peer] = replace(activation, leaves=tuple(leaves), versions=tuple(versions))


def _give_up_ends(tape: Tape, slots: Slots) -> None:
    """Free the values of entries and exported leaves: the backward needs their gradients only."""
    for peer, place, leaf in list(_received(tape, slots)):
        empty = without_values(leaf.detach())
        _put_leaf(tape, peer, place, empty)
        entry = tape.entries[peer][place]
        if entry.node is None:
            entry.tensor = empty
        else:
            entry.tensor.data = empty  # layers saw a twin of it, see Handover.enter
    for leaves in tape.exported.values():
        leaves[:] = [
            without_values(leaf) if slots.may_move(leaf) and not lasts(leaf) else leaf
            for leaf in leaves
        ]
