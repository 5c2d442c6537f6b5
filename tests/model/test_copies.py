"""Copies that layers may change lie as the original does, and gradients pass through them."""

import pytest
import torch
from torch import Tensor

from penstock.model.copies import CACHE_LINE_BYTES, faithful_copy


def _starting_at(element: int, rows: int = 6, columns: int = 5) -> Tensor:
    """Return a matrix whose first element has this place in memory, in elements."""
    return torch.arange(float(element + rows * columns))[element:].view(rows, columns)


@pytest.mark.parametrize(
    "original",
    [
        pytest.param(_starting_at(0), id="whole"),
        pytest.param(_starting_at(3), id="odd_address"),
        pytest.param(_starting_at(1)[:, 1:4], id="columns"),
        pytest.param(_starting_at(2).t(), id="transposed"),
        pytest.param(_starting_at(5).to(torch.bfloat16)[1:], id="bfloat16"),
    ],
)
def test_a_copy_has_the_strides_and_the_place_in_a_cache_line_of_its_original(
    original: Tensor,
) -> None:
    copied = faithful_copy(original)

    assert torch.equal(copied, original)
    assert copied.data_ptr() != original.data_ptr()
    assert copied.stride() == original.stride()
    # Not every processor's kernels add in an order that shows a difference here.
    assert copied.data_ptr() % CACHE_LINE_BYTES == original.data_ptr() % CACHE_LINE_BYTES


def test_a_gradient_passes_through_a_copy_unchanged() -> None:
    original = _starting_at(3).requires_grad_()

    copied = faithful_copy(original)
    copied.mul_(2).sum().backward()

    assert original.grad is not None
    assert torch.equal(original.grad, torch.full((6, 5), 2.0))


def test_an_expanded_tensor_which_nothing_may_change_in_place_is_not_copied() -> None:
    expanded = torch.ones(3, 1).expand(3, 4)

    assert faithful_copy(expanded) is expanded
