"""Add a note to an out-of-memory error: what the stage keeps, and which options keep less."""

import torch

from penstock.runtime.run import Run
from penstock.schedules.ir import Instruction

_REMEDIES = (
    'To keep less, try in this order: recompute="layers"; a larger num_microbatches; a schedule '
    'that keeps fewer micro-batches ("1f1b", "v-half"); memory_limit_bytes=...; offload=True'
)
_FRAGMENTED = (
    ". If much memory is reserved but unallocated, set "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, but not with CUDA graphs and NCCL together"
)


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
