"""Small members of every family of the zoo, with all that is random or hard in them on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.zoo import bottleneck_resnet, unet

BATCH = 9
"""Samples of an example, so that four micro-batches are uneven, and none has one sample only."""

Member = tuple[nn.Module, Any]
"""A model, and what it is called with: `BATCH` samples along dimension 0 of each tensor."""


def _resnet() -> Member:
    return bottleneck_resnet((1, 2), 4, num_classes=5), torch.randn(BATCH, 3, 24, 17)


def _wide_resnet() -> Member:
    return bottleneck_resnet((1, 1, 1), 4, 2, num_classes=5), torch.randn(BATCH, 3, 17, 24)


def _unet() -> Member:
    return unet(depth=3, width=4, dropout=0.2), torch.randn(BATCH, 3, 11, 14)


def _unet_group_norm() -> Member:
    return unet(depth=2, width=4, norm="group", dropout=0.2), torch.randn(BATCH, 3, 8, 9)


ZOO_MEMBERS: dict[str, Callable[[], Member]] = {
    "resnet": _resnet,
    "wide_resnet": _wide_resnet,
    "unet": _unet,
    "unet, group norm": _unet_group_norm,
}
"""Name -> what makes the member; it draws weights and inputs from torch's global generator."""
