"""Augmentation by small shifts, keyed by (seed, epoch, sample) and so the same after a resume."""

import torch
from torch import Tensor

from .sampler import keyed_generator


def epoch_shifts(num_samples: int, seed: int, epoch: int, max_shift: int) -> Tensor:
    """Draw each sample's shift (rows down, columns right), in -max_shift..max_shift.

    int64, (num_samples, 2).
    """
    generator = keyed_generator(seed, "shift", epoch)
    return torch.randint(-max_shift, max_shift + 1, (num_samples, 2), generator=generator)


def shift_images(images_BCHW: Tensor, shifts_B2: Tensor) -> Tensor:
    """Move each image by its shift; what enters at the border is zero."""
    height, width = images_BCHW.shape[-2:]
    rows = torch.arange(height) - shifts_B2[:, :1]  # (B, H): where each row comes from
    columns = torch.arange(width) - shifts_B2[:, 1:]
    inside = _inside(rows, height)[:, None, :, None] & _inside(columns, width)[:, None, None, :]
    batch = torch.arange(len(images_BCHW))[:, None, None]
    row_index = rows.clamp(0, height - 1)[:, :, None]
    column_index = columns.clamp(0, width - 1)[:, None, :]
    moved_BHWC = images_BCHW.permute(0, 2, 3, 1)[batch, row_index, column_index]
    return moved_BHWC.permute(0, 3, 1, 2).contiguous() * inside


def _inside(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)
