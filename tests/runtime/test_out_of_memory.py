"""An out-of-memory error says what its stage keeps, and which options keep less."""

import pytest
import torch
from torch import Tensor, nn

import penstock

_REMEDIES = (
    'To keep less, try in this order: recompute="layers"; a larger num_microbatches; a schedule '
    'that keeps fewer micro-batches ("1f1b", "v-half"); memory_limit_bytes=...; offload=True'
)
_FRAGMENTED = (
    ". If much memory is reserved but unallocated, set "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, but not with CUDA graphs and NCCL together"
)


class Full(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error, self.calls = error, 0

    def forward(self, values: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise self.error
        return values.tanh()


@pytest.mark.parametrize("transport", ["loopback", "threads"])
@pytest.mark.parametrize(
    "error, trace, size, end",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "off", "", ""),
        (
            torch.OutOfMemoryError("1 GiB is reserved by PyTorch but unallocated."),
            "memory",
            " (512 bytes in all)",
            _FRAGMENTED,
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "off", "", ""),
        (RuntimeError("another fault"), "off", "", None),
    ],
)
def test_the_note_has_the_place_and_the_remedies(error, trace, size, end, transport) -> None:
    layers = [nn.Linear(8, 8), Full(type(error)(*error.args)), nn.Linear(8, 8)]
    with penstock.Pipeline(
        layers,
        partition=[1, 2],
        num_microbatches=4,
        loss=nn.MSELoss(),
        schedule="gpipe",
        recompute="never",
        trace=trace,
        transport=transport,
    ) as pipe:
        batch = torch.randn(8, 8)
        with pytest.raises(RuntimeError) as caught:
            pipe.train_step(batch, batch)
    notes = caught.value.__notes__
    assert notes[0] == "raised on stage 1, in layer '1' (Full), micro-batch 2"
    expected = (
        "out of memory at 1F2 on stage 1, which keeps the activations of 2 other micro-batches"
        f"{size}. {_REMEDIES}{end}"
    )
    assert notes[1:] == ([] if end is None else [expected])
