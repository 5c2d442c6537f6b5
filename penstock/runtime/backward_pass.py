"""Run autograd for one micro-batch of one stage, and refuse state that it changes out of order.

The unsplit model runs the backward of a micro-batch before the forward of the next.  Gradients do
not depend on that, but what a backward writes and a forward reads does:

    unsplit    F0 B0 F1 B1 F2 B2        F1 reads what B0 wrote
    gpipe      F0 F1 F2 B0 B1 B2        F1 reads what was there before the step
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property

import torch
from torch import Tensor, nn

from penstock.errors import StateError
from penstock.model.state import Place, attributes, read_state
from penstock.torch_private import AnyBatchNorm, buffers_of
from penstock.transport.payload import version_of

from .batch_norm import separate_statistics
from .default_generators import alone_with_generators, checked_draws
from .random_streams import refuse_draws
from .run import Kept, Run

Versions = dict[Place, tuple[Tensor, int]]


class BackwardPass:
    """Runs the backward passes of the given modules, those of one stage."""

    def __init__(
        self,
        stage: int,
        modules: Sequence[nn.Module],
        norms: tuple[AnyBatchNorm, ...],
        device: torch.device,
    ) -> None:
        self._stage, self._batch_norms, self._device = stage, norms, device
        self._state = _State(modules, skip=norms)

    def run(
        self, run: Run, microbatch: int, kept: Kept, roots: list[Tensor], grads: list[Tensor]
    ) -> None:
        """Add to the gradients of all leaves behind `roots`.

        Raises:
            StateError: it changed a buffer, or a tensor attribute in place, and a forward of a
                later micro-batch has run already, which in the unsplit model comes after it.
        """
        later = range(microbatch + 1, len(run.inputs))
        if not (self._state.is_any and any((self._stage, i) in run.kept for i in later)):
            self._run_autograd(run, kept, roots, grads)
            return
        before = self._state.versions()
        self._run_autograd(run, kept, roots, grads)
        self._state.check_unchanged(before)

    def _run_autograd(
        self, run: Run, kept: Kept, roots: list[Tensor], gradients: list[Tensor]
    ) -> None:
        device = self._device
        kind = device.type
        under_autocast = not run.resumed and torch.is_autocast_enabled(kind)
        if not (under_autocast or kept.reruns_in_backward or run.has_seeded):
            torch.autograd.backward(roots, gradients)
            return
        with ExitStack() as context:
            if under_autocast:  # operators take the types of their forwards; as torch advises
                context.enter_context(torch.autocast(kind, enabled=False))
            if run.has_seeded:
                context.enter_context(alone_with_generators(device))
            if kept.reruns_in_backward or kept.draws_again:
                context.enter_context(separate_statistics(self._batch_norms, into=None))
                repeats = kept.draws_again and not kept.must_not_draw
                context.enter_context(checked_draws(device) if repeats else refuse_draws())
            torch.autograd.backward(roots, gradients)


class _State:
    """The buffers of modules, and the tensors that they hold as plain attributes.

    An attribute that a backward replaces is let pass: hooks keep what they saw there, and a
    checkpoint of the user's own runs a forward again that does.
    """

    def __init__(self, modules: Iterable[nn.Module], skip: Iterable[nn.Module]) -> None:
        skipped = set(skip)
        everyone = dict.fromkeys(m for root in modules for m in root.modules())
        self._modules = [module for module in everyone if module not in skipped]

    @cached_property  # asked after the first forward: layers may make state there
    def _attributes(self) -> list[Place]:
        return attributes(self._modules)

    @cached_property
    def _holders(self) -> list[nn.Module]:
        return [m for m in self._modules if list(buffers_of(m).items())]

    @cached_property
    def is_any(self) -> bool:
        """Whether there is a tensor to look at."""
        return bool(self._holders or self._attributes)

    def versions(self) -> Versions:
        """Note which tensor stands at each place, and how often it was changed in place."""
        now = read_state(self._holders, self._attributes)
        return {p: (tensor, version_of(tensor)) for p, tensor in now.items() if tensor is not None}

    def check_unchanged(self, before: Versions) -> None:
        """Compare with what was there before.

        Raises:
            StateError: a tensor was changed in place, or a buffer was replaced.
        """
        for place, (tensor, version) in self.versions().items():
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
