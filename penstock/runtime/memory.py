"""Count the bytes that a stage keeps for its backward passes: exact, by storage, not process size.

Counted: the values a stage received, and the storages autograd saved for it, each storage once.
Not counted: parameters, buffers, gradients, and the caller's own batch beyond the views kept of
it.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.model.pytree import flatten
from penstock.trace.timeline import MemorySample

from .guards import Context, Guard
from .run import Run
from .tape import FROM_CALLER, Tape


class KeptBytes(Guard):
    """Counts for one stage, where a run traces memory."""

    def __init__(self, stage: int, modules: Iterable[nn.Module], computes_loss: bool) -> None:
        self._stage = stage
        self._computes_loss = computes_loss
        self._modules = tuple(modules)

    def around_forward(self, run: Run, tape: Tape) -> Context | None:
        """Count what autograd saves, if it does, and then the values that came to the stage."""
        return self._counting_inputs(run, tape) if run.with_grad else None

    @contextmanager
    def _counting_inputs(self, run: Run, tape: Tape) -> Iterator[None]:
        counted = run.stages[self._stage].kept_bytes.setdefault(tape.microbatch, {})
        with nullcontext() if tape.graph_dropped else self._counting_saved(run, tape):
            yield
        for leaf in tape.inputs:
            counted[_storage(leaf)] = leaf.untyped_storage().nbytes()
        of_batch = self._batch_leaves(run, tape)
        for leaf in of_batch:
            counted.pop(_storage(leaf), None)
        for leaf in of_batch:
            counted[leaf.data_ptr()] = leaf.numel() * leaf.element_size()
        self._sample(run)

    @contextmanager
    def around_recompute(self, run: Run, tape: Tape) -> Iterator[None]:
        """Count what autograd saves."""
        with self._counting_saved(run, tape):
            yield
        self._sample(run)

    def _counting_saved(self, run: Run, tape: Tape) -> saved_tensors_hooks:
        ignored = {_storage(t) for m in self._modules for t in (*m.parameters(), *m.buffers())}
        ignored |= {_storage(t) for t in self._batch_leaves(run, tape)}
        counted = run.stages[self._stage].kept_bytes[tape.microbatch]

        def pack(tensor: Tensor) -> Tensor:
            storage = _storage(tensor)
            if storage not in ignored:
                counted[storage] = tensor.untyped_storage().nbytes()
            return tensor

        return saved_tensors_hooks(pack, _as_it_is)

    def after_backward(self, run: Run, tape: Tape) -> None:
        """Stop counting what was kept for the micro-batch."""
        run.stages[self._stage].kept_bytes.pop(tape.microbatch, None)
        self._sample(run)

    def _batch_leaves(self, run: Run, tape: Tape) -> list[Tensor]:
        """Return the views of the caller's batch that the stage works on."""
        leaves = list(tape.received[FROM_CALLER].leaves) if FROM_CALLER in tape.received else []
        if self._computes_loss and run.loss is not None:
            leaves += flatten(run.batch.targets[tape.microbatch])[0]
        return leaves

    def _sample(self, run: Run) -> None:
        """Note how many bytes the stage keeps now."""
        kept: dict[int, int] = {}
        for storages in run.stages[self._stage].kept_bytes.values():
            kept.update(storages)
        sample = MemorySample(self._stage, time.perf_counter(), sum(kept.values()))
        run.recorded.memory.append(sample)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
