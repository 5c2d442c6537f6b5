"""Refuse state that the backward of a micro-batch changes out of order.

The unsplit model runs the backward of a micro-batch before the forward of the next.  Gradients do
not depend on that, but what a backward writes and a forward reads does:

    unsplit    F0 B0 F1 B1 F2 B2        F1 reads what B0 wrote
    gpipe      F0 F1 F2 B0 B1 B2        F1 reads what was there before the step
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

from torch import Tensor, nn

from penstock.errors import StateError
from penstock.model.entries import version_of
from penstock.model.state import Place, attributes, read_state
from penstock.torch_private import buffers_of

from .guards import Context, Guard
from .run import Run
from .tape import Tape

Versions = dict[Place, tuple[Tensor, int]]


class BackwardState(Guard):
    """Watches the buffers of modules, and the tensors that they hold as plain attributes.

    An attribute that a backward replaces is let pass: hooks keep what they saw there, and a
    checkpoint of the user's own runs a forward again that does.
    """

    def __init__(self, stage: int, modules: Sequence[nn.Module]) -> None:
        self._stage, self._modules = stage, modules

    @cached_property  # asked after the first forward: layers may make state there
    def _attributes(self) -> list[Place]:
        return attributes(self._modules)

    @cached_property
    def _holders(self) -> list[nn.Module]:
        return [m for m in self._modules if list(buffers_of(m).items())]

    @property
    def is_idle(self) -> bool:
        return not (self._holders or self._attributes)

    def around_backward(self, run: Run, tape: Tape) -> Context | None:
        """Compare what forwards may read before and after, if one has run too early."""
        ran = run.stages[self._stage].tapes
        early = not self.is_idle and any(other > tape.microbatch for other in ran)
        return self._comparing() if early else None

    @contextmanager
    def _comparing(self) -> Iterator[None]:
        before = self._versions()
        yield
        self._check_unchanged(before)

    def _versions(self) -> Versions:
        """Note which tensor stands at each place, and how often it was changed in place."""
        now = read_state(self._holders, self._attributes)
        return {p: (tensor, version_of(tensor)) for p, tensor in now.items() if tensor is not None}

    def _check_unchanged(self, before: Versions) -> None:
        """Compare with what was there before.

        Raises:
            StateError: a tensor was changed in place, or a buffer was replaced.
        """
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
