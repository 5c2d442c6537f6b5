"""Count a stage's memory in bytes: exact, by storage, not by process size.

activations   received values, autograd's saved tensors (each storage once), tensors between
              the two parts of a split backward, older versions of weights
weights       the parameters and buffers that the stage owns
gradients     their `.grad`
not counted   other gradients, the caller's batch beyond the views kept, temporary memory of
              operators, the optimizer's state

An out-of-memory error gets a note of what the stage keeps.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.runtime.run import Run
from penstock.runtime.stage.guards import Context, LayersGuard
from penstock.runtime.stage.tape import Tape
from penstock.runtime.stage.weights import Weights
from penstock.schedules.ir import Instruction
from penstock.torch_private import NEVER_COMPUTES
from penstock.trace.timeline import MemoryKind, MemorySample

from .offload import OutlivingTensors

_REMEDIES = (
    'To keep less, try in this order: recompute="layers"; a larger num_microbatches; a schedule '
    'that keeps fewer micro-batches ("1f1b", "v-half"); memory_limit_bytes=...; offload=True'
)
_FRAGMENTED = (
    ". If much memory is reserved but unallocated, set "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, but not with CUDA graphs and NCCL together"
)


class KeptBytes(LayersGuard):
    """Counts the activation memory of one stage, if a run traces memory."""

    def __init__(self, stage: int, outliving: OutlivingTensors, weights: Weights) -> None:
        self._stage, self._outliving, self._weights = stage, outliving, weights

    def around_forward(self, run: Run, tape: Tape) -> Context | None:
        """Count autograd's saved tensors, then the received values."""
        return self._counting_inputs(run, tape) if run.caller.with_grad else None

    @contextmanager
    def _counting_inputs(self, run: Run, tape: Tape) -> Iterator[None]:
        run.stages[self._stage].kept_bytes[tape.microbatch] = {}
        is_counted = tape.graph_dropped or tape.slots is not None
        with nullcontext() if is_counted else self._counting_saved(run, tape):
            yield
        self.after_move(run, tape)

    def after_move(self, run: Run, tape: Tape) -> None:
        """Count the received values, and the tensors in slots."""
        counted = run.stages[self._stage].kept_bytes[tape.microbatch]
        if tape.slots is not None or tape.away is not None:
            counted.clear()
        in_slots = [slot.tensor for slot in tape.slots or () if slot.tensor is not None]
        for leaf in [*tape.inputs, *in_slots]:
            counted[_storage(leaf)] = leaf.untyped_storage().nbytes()
        # Views of the caller's batch count by their elements, not by the batch's storage.
        of_batch = self._outliving.of_batch(run, tape)
        for leaf in of_batch:
            counted.pop(_storage(leaf), None)
        for leaf in of_batch:
            counted[leaf.data_ptr()] = leaf.numel() * leaf.element_size()
        self._sample(run)

    @contextmanager
    def around_recompute(self, run: Run, tape: Tape) -> Iterator[None]:
        """Count autograd's saved tensors in the recompute."""
        with nullcontext() if tape.slots is not None else self._counting_saved(run, tape):
            yield
        if tape.slots is not None:
            self.after_move(run, tape)
        else:
            self._sample(run)

    def _counting_saved(self, run: Run, tape: Tape) -> saved_tensors_hooks:
        ignored = {_storage(tensor) for tensor in self._outliving.of(run, tape)}
        counted = run.stages[self._stage].kept_bytes[tape.microbatch]

        def pack(tensor: Tensor) -> Tensor:
            storage = _storage(tensor)
            if storage not in ignored:
                counted[storage] = tensor.untyped_storage().nbytes()
            return tensor

        return saved_tensors_hooks(pack, _as_it_is)

    def after_input(self, run: Run, tape: Tape) -> None:
        """Count the tensors of the weight backward only."""
        counted = run.stages[self._stage].kept_bytes[tape.microbatch] = {}
        of_batch = {_storage(tensor) for tensor in self._outliving.of_batch(run, tape)}
        lasting = {_storage(tensor) for tensor in self._outliving.of(run, tape)}
        for tensor in tape.waiting:
            storage = _storage(tensor)
            if storage in of_batch:
                counted[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            elif storage not in lasting:
                counted[storage] = tensor.untyped_storage().nbytes()
        self._sample(run)

    def after_backward(self, run: Run, tape: Tape) -> None:
        """Stop counting the micro-batch."""
        run.stages[self._stage].kept_bytes.pop(tape.microbatch, None)
        self._sample(run)

    def _sample(self, run: Run) -> None:
        """Record the stage's memory at this moment, in bytes; each kind when it changes."""
        bytes_of: dict[int, int] = {}
        for storages in run.stages[self._stage].kept_bytes.values():
            bytes_of.update(storages)
        owned = self._weights.owned
        now = {
            MemoryKind.ACTIVATIONS: sum(bytes_of.values()) + self._weights.bytes_of_older,
            MemoryKind.GRADIENTS: _size([p.grad for p in owned.parameters]),
        }
        time_s, last = time.perf_counter(), run.stages[self._stage].last_bytes
        if not last:  # the first sample of the run
            now[MemoryKind.WEIGHTS] = _size([*owned.parameters, *owned.buffers])
        for kind, num_bytes in now.items():
            if num_bytes != last.get(kind, 0) or kind is MemoryKind.ACTIVATIONS:
                sample = MemorySample(self._stage, time_s, num_bytes, kind)
                run.recorded.memory.append(sample)
        last.update(now)


def note_out_of_memory(error: RuntimeError, instruction: Instruction, run: Run) -> None:
    """Add the note if a device, or torch's allocator on the CPU, had no memory left.

    The bytes that the stage keeps are known if the run traces memory; each storage counts once.
    """
    text = str(error)
    if not (isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text):
        return
    here = run.stages[instruction.stage]
    others = here.tapes.keys() - {getattr(instruction, "microbatch", None)}
    kept, storages = len(others), dict[int, int]()
    for microbatch in others:
        storages.update(here.kept_bytes.get(microbatch, {}))
    size = f" ({sum(storages.values()):,} bytes in all)" if storages else ""
    error.add_note(
        f"out of memory at {instruction} on stage {instruction.stage}, which keeps the "
        f"activations of {kept} other micro-batch{'' if kept == 1 else 'es'}{size}. {_REMEDIES}"
        f"{_FRAGMENTED if 'reserved by PyTorch but unallocated' in text else ''}"
    )


def _size(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of tensors, each storage once; sparse ones are not counted."""
    dense = [t for t in tensors if t is not None and t.layout is torch.strided]
    return sum({_storage(t): t.untyped_storage().nbytes() for t in dense}.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


setattr(_as_it_is, NEVER_COMPUTES, True)
