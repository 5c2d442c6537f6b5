"""Count the bytes that a stage keeps for its backward passes: exact, by storage, not process size.

Counted: the values a stage received, and the storages autograd saved for it, each storage once.
Not counted: parameters, buffers, gradients, and the caller's own batch beyond the views kept of
it.
"""

import time
from collections.abc import Iterable
from contextlib import ExitStack

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.model.pytree import flatten
from penstock.trace.timeline import MemorySample
from penstock.types import Trace

from .run import FROM_CALLER, Kept, Run

StorageBytes = dict[int, int]


class KeptBytes:
    """Watches the forwards of one stage when a run traces memory; otherwise does nothing."""

    def __init__(self, stage: int, modules: Iterable[nn.Module], computes_loss: bool) -> None:
        self._stage = stage
        self._computes_loss = computes_loss
        self._modules = tuple(modules)

    def watch(self, run: Run, microbatch: int, kept: Kept, context: ExitStack) -> None:
        """Count what autograd saves while `context` is open."""
        if run.trace is not Trace.MEMORY:
            return
        ignored = {_storage(t) for m in self._modules for t in (*m.parameters(), *m.buffers())}
        ignored |= {_storage(t) for t in self._batch_leaves(run, microbatch, kept)}
        counted = run.kept_bytes[self._stage, microbatch]

        def pack(tensor: Tensor) -> Tensor:
            storage = _storage(tensor)
            if storage not in ignored:
                counted[storage] = tensor.untyped_storage().nbytes()
            return tensor

        context.enter_context(saved_tensors_hooks(pack, _as_it_is))

    def note_inputs(self, run: Run, microbatch: int, kept: Kept) -> None:
        """Count the values that came to the stage for `microbatch`, targets included."""
        if run.trace is not Trace.MEMORY:
            return
        counted = run.kept_bytes[self._stage, microbatch]
        for leaf in kept.inputs:
            counted[_storage(leaf)] = leaf.untyped_storage().nbytes()
        for leaf in self._batch_leaves(run, microbatch, kept):
            counted.pop(_storage(leaf), None)
        for leaf in self._batch_leaves(run, microbatch, kept):
            counted[leaf.data_ptr()] = leaf.numel() * leaf.element_size()

    def _batch_leaves(self, run: Run, microbatch: int, kept: Kept) -> list[Tensor]:
        """Give the views of the caller's batch that the stage works on."""
        leaves = list(kept.received[FROM_CALLER].leaves) if FROM_CALLER in kept.received else []
        if self._computes_loss and run.targets:
            leaves += flatten(run.targets[microbatch])[0]
        return leaves

    def forget(self, run: Run, microbatch: int) -> None:
        """Stop counting what was kept for `microbatch`."""
        if run.trace is Trace.MEMORY:
            run.kept_bytes.pop((self._stage, microbatch), None)

    def sample(self, run: Run) -> None:
        """Note how many bytes the stage keeps now."""
        if run.trace is not Trace.MEMORY:
            return
        kept: StorageBytes = {}
        for (stage, _), storages in list(run.kept_bytes.items()):
            if stage == self._stage:
                kept.update(storages)
        run.memory.append(MemorySample(self._stage, time.perf_counter(), sum(kept.values())))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
