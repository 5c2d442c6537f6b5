"""Tensors on the wire arrive with their values, strides and alignment, whatever they look like."""

import pytest
import torch
from torch import Tensor

from penstock.model.copies import CACHE_LINE_BYTES
from penstock.transport.wire import TensorKind, fill, room_for, to_bytes


class Marked(Tensor):
    """A subclass that holds nothing of its own."""


BASE = torch.arange(240.0)
TENSORS = {
    "of a subclass": BASE.view(4, 60).as_subclass(Marked),
    "of a subclass, gaps": BASE.view(4, 60)[:, ::2].as_subclass(Marked),
    "plain": BASE.view(4, 60),
    "transposed": BASE.view(4, 60).t(),
    "channels last": BASE.view(1, 4, 6, 10).contiguous(memory_format=torch.channels_last),
    "gaps": BASE.view(4, 60)[:, 3:50:2],
    "odd address": BASE[3:51].view(6, 8),
    "expanded": BASE[:5].view(5, 1).expand(5, 7),
    "one value, expanded": BASE[7].expand(3, 4),
    "one value": BASE[9:10],
    "empty": BASE[:0].view(0, 3),
    "empty, expanded": BASE[:1].view(1, 1).expand(3, 0),
    "numbers": torch.arange(6).view(2, 3),
    "truths": torch.tensor([True, False, True]),
    "bfloat16": BASE.bfloat16().view(6, 40).t(),
    "complex, conjugated": torch.view_as_complex(BASE.view(120, 2).clone()).conj(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_left(name: str) -> None:
    tensor = TENSORS[name]
    kind = TensorKind.of(tensor)
    received, arrived = room_for(kind, torch.device("cpu"))
    sent = to_bytes(tensor, kind)
    assert sent.numel() == kind.num_bytes
    if kind.num_bytes:
        received.copy_(sent)
    arrived = fill(arrived, received, kind)
    assert torch.equal(arrived, tensor)
    assert type(arrived) is type(tensor)
    assert arrived.stride() == tensor.stride()
    assert distance(arrived) == distance(tensor) or not tensor.numel()


def distance(tensor: Tensor) -> int:
    return tensor.data_ptr() % CACHE_LINE_BYTES
